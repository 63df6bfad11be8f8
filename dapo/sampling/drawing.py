"""Draw prompts for new groups: new ones from the stream, chosen by ledger and forecast, and earlier kept ones again."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dapo.algorithm.forecast import Forecast, most_promising, project
from dapo.algorithm.ledger import Ledger
from dapo.checkpoint.state import DrawerState
from dapo.config import Config
from dapo.data.stream import PromptStream
from dapo.types import Drawn, Group, Outlook, Prompt

Features = Callable[[Sequence[Prompt]], np.ndarray]  # [N, d]
MIN_BATCHES = 8  # a prompt is drawn again only after this many batches of other kept groups

_ERROR_SHARE = 0.5  # share of a prompt's last forecast error that is added to its next forecast


@dataclass(frozen=True, slots=True, eq=False)
class _Ahead:
    """One of the next prompts of the stream."""

    prompt: Prompt
    outlook: Outlook | None = None
    is_promising: bool = True


class PromptDrawer:
    """Draws prompts from the stream as the ledger admits them; a share `algorithm.ledger.revisit` are revisits.

    A prompt whose group was kept is likely to be kept again, while new prompts are kept less often as the model
    improves. The prompt that was drawn longest ago is revisited first, so that its visits are far apart.

    With `features`, the drawer looks `algorithm.ledger.lookahead` times as many prompts ahead in the stream as it must
    draw, and skips those whose expected pass rate is further from one half.
    """

    def __init__(self, config: Config, stream: PromptStream, features: Features | None = None) -> None:
        options = config.algorithm.ledger
        self.features, self.lookahead = features, options.lookahead
        self.forecast = Forecast()
        self.forecast_errors: dict[str, float] = {}  # by uid: latest pass rate with a forecast minus that forecast
        self.stream = stream
        self.uses_ledger, self.share = options.enable, options.revisit
        self.ledger = Ledger(options.explore, config.run.seed, options.lookahead)
        self.least_known = MIN_BATCHES * config.data.train_batch_size
        # Prompts whose latest group was kept, by uid, longest ago first: those that may be visited, and the
        # `least_known` latest (all of them if they are fewer), which may not.
        self.known: OrderedDict[str, Prompt] = OrderedDict()
        self.latest: OrderedDict[str, Prompt] = OrderedDict()
        self.drawn = self.revisited = 0  # prompts drawn so far, and how many of them were revisits
        self.skipped = 0  # prompts that the ledger did not admit, since `take_skipped`

    def draw(self, count: int, busy: Iterable[str] = ()) -> list[Drawn]:
        """Draw prompts for `count` groups. `busy`: uids of the prompts of other groups in this step or in flight."""
        drawn: list[Drawn] = []
        taken = Counter(busy)  # by uid, with those drawn here
        window: deque[_Ahead] = deque()
        while len(drawn) < count:
            drawn.append(self._revisit() or self._next(taken, count - len(drawn), window))
            taken[drawn[-1].prompt.uid] += 1
        return drawn

    def record(self, group: Group, outlook: Outlook | None = None) -> None:
        """Record the outcome of a group, and remember its prompt for a revisit if there is more to learn from it.

        `outlook`: the one its prompt was drawn with.
        """
        self.ledger.record(group)
        accs = [score.acc for score in group.scores if score.judged]
        if outlook is not None and accs and None not in accs:
            rate = float(np.mean([float(acc) for acc in accs if acc is not None]))
            self.forecast.record(outlook.features_K, rate)
            if outlook.forecast is not None:
                self.forecast_errors[group.prompt.uid] = rate - outlook.forecast
        if self.share > 0:
            self._remember(group)

    def take_skipped(self) -> int:
        skipped, self.skipped = self.skipped, 0
        return skipped

    def state(self) -> DrawerState:
        return DrawerState(
            positions=list(self.stream.positions),
            data_digest=self.stream.digest,
            considered=self.ledger.considered,
            ledger=self.ledger.state(),
            known=[*self.known.values(), *self.latest.values()],
            drawn=self.drawn,
            revisited=self.revisited,
            forecast=self.forecast.state(),
            forecast_errors=dict(self.forecast_errors),
        )

    def restore(self, state: DrawerState) -> None:
        self.stream.restore(state.positions, state.data_digest)
        self.ledger.restore(state.ledger, state.considered)
        self.known, self.latest = OrderedDict(), OrderedDict()
        for prompt in state.known:
            self.latest[prompt.uid] = prompt
            self.latest.move_to_end(prompt.uid)  # earlier versions saved a prompt once for each of its kept groups
        self._divide()
        self.drawn, self.revisited = state.drawn, state.revisited
        self.forecast = Forecast.of(state.forecast)
        self.forecast_errors = dict(state.forecast_errors)
        self.skipped = 0

    def _remember(self, group: Group) -> None:
        """Put the prompt of a kept group last, and forget one that became flat; its next kept group brings it back."""
        uid, is_flat = group.prompt.uid, self.ledger.history(group.prompt.uid).flat_in_a_row > 0
        if group.kept or is_flat:
            self.known.pop(uid, None)
            self.latest.pop(uid, None)
        if group.kept and not is_flat:
            self.latest[uid] = group.prompt
        self._divide()

    def _divide(self) -> None:
        """Move prompts between `known` and `latest`, until the latter has `least_known` or all."""
        while len(self.latest) > self.least_known:
            uid, prompt = self.latest.popitem(last=False)
            self.known[uid] = prompt
        while self.known and len(self.latest) < self.least_known:
            uid, prompt = self.known.popitem()
            self.latest[uid] = prompt
            self.latest.move_to_end(uid, last=False)

    def _revisit(self) -> Drawn | None:
        """Return a prompt to revisit, or None if no revisit is due or no prompt is worth one."""
        if self.revisited >= self.share * self.drawn:
            return None
        for _ in range(len(self.known)):
            uid, prompt = self.known.popitem(last=False)
            if self.ledger.is_worth_a_visit(uid):
                self.drawn += 1
                self.revisited += 1
                return Drawn(prompt)
            self.known[uid] = prompt
        return None

    def _next(self, taken: Counter[str], missing: int, window: deque[_Ahead]) -> Drawn:
        """Return the next prompt of the stream that the ledger admits.

        `missing` prompts are still to be drawn besides `taken`. `window`: prompts already looked at; refilled when
        empty.
        """
        self.drawn += 1
        while True:
            if not window:
                window.extend(self._look_ahead(taken, missing))
            ahead = window.popleft()
            self.stream.skip()
            if not self.uses_ledger:
                return Drawn(ahead.prompt)
            uid = ahead.prompt.uid
            if self.ledger.admits(uid, is_promising=ahead.is_promising):
                return Drawn(ahead.prompt, self.ledger.chance(uid), ahead.outlook)
            self.skipped += 1

    def _look_ahead(self, taken: Counter[str], missing: int) -> list[_Ahead]:
        """Return the next prompts of the stream, of which the `missing` most promising are marked.

        A prompt that is repeated in a small data set, among the next prompts or in `taken`, comes after all others.
        """
        if self.features is None:
            return [_Ahead(prompt) for prompt in self.stream.peek(1)]
        wanted = missing * (self.lookahead if self.forecast.is_ready else 1)
        # More than an epoch would only repeat prompts.
        prompts = self.stream.peek(max(missing, min(wanted, self.stream.size or wanted)))
        features_NK = project(self.features(prompts))
        forecasts_N = self.forecast.predict(features_NK)
        errors_N = np.array([self.forecast_errors.get(prompt.uid, 0.0) for prompt in prompts])
        seen, repeats = Counter(taken), []  # earlier occurrences of each prompt
        for prompt in prompts:
            repeats.append(seen[prompt.uid])
            seen[prompt.uid] += 1
        promising_N = most_promising(forecasts_N + _ERROR_SHARE * errors_N, repeats, missing)
        return [
            _Ahead(prompt, _outlook(features_K, float(forecast)), bool(is_promising))
            for prompt, features_K, forecast, is_promising in zip(
                prompts, features_NK, forecasts_N, promising_N, strict=True
            )
        ]


def _outlook(features_K: np.ndarray, forecast: float) -> Outlook | None:
    """Return None if the features are not finite, so that the forecast does not learn from them."""
    if not np.isfinite(features_K).all():
        return None
    return Outlook(features_K, None if np.isnan(forecast) else forecast)
