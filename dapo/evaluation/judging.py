"""Try a judge without a run: judge single responses, and show what the judge made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dapo.config import Config, RewardConfig, Source
from dapo.data.prompt_format import PromptFormat
from dapo.data.readers import read_rows
from dapo.data.rows import QUESTION_COLUMNS, read_question
from dapo.data.stream import any_answers
from dapo.errors import ConfigError, DataError, RewardError
from dapo.rewards.judge import (
    AUTO,
    RewardFunctions,
    build_judge,
    check_columns,
    judge_kinds,
    judge_specs,
    uses_reward_model,
)
from dapo.rewards.rules import RULES
from dapo.types import TERM, Prompt, Rollout, Score

NO_QUESTION = "(no question)"


@dataclass(frozen=True, slots=True)
class Judgment:
    """The result of judging one response. If `score` is None, `error` is the reason."""

    score: float | None
    acc: float | None  # right (True) or wrong (False), or a share, if the judge says so
    extracted: Any  # the answer that was found, if the judge says which
    error: str | None
    components: Mapping[str, float]  # the scores of a weighted sum's terms, and other numbers that the reward returned
    extras: Mapping[str, Any]  # everything that the reward returned besides

    @property
    def verdict(self) -> str:
        if self.error is not None:
            return "unjudged"
        if self.acc is None:
            return "scored"
        if self.acc == 1:
            return "correct"
        return f"{self.acc:.0%} correct" if self.acc else "wrong"


class Response(NamedTuple):
    """A response with its row. `tokens` None: the token ids are not known."""

    prompt: Prompt
    text: str
    tokens: Sequence[int] | None = None


def judge(
    use: str | Mapping[str, float] | RewardConfig | RewardFunctions,
    completion: str,
    answer: Any = None,
    *,
    prompt: str | Sequence[Mapping[str, str]] | None = None,
    completion_ids: Sequence[int] | None = None,
    **columns: Any,
) -> Judgment:
    """Judge one response: `dapo.judge("math", completion="Answer: 34", answer="34")`.

    `use` is what `reward.use` may be, a whole `RewardConfig`, or what `Trainer` takes as `reward_funcs`. `prompt` and
    `columns` are the rest of the row, for judges that read them, and `completion_ids` the token ids.
    """
    function: Any = None
    if isinstance(use, RewardConfig):
        options = use
    elif isinstance(use, str) or (isinstance(use, Mapping) and all(isinstance(key, str) for key in use)):
        options = reward_options({"use": use})
    else:
        options, function = RewardConfig(), use
    response = response_to(completion, prompt, answer, completion_ids, columns)
    (judgment,) = judge_all([response], options.model_copy(update={"workers": 1}), function)
    return judgment


def reward_options(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> RewardConfig:
    """Return the section `reward` alone, checked as that of a recipe."""
    recipe = {"model": {"path": "none"}, "data": {"train": "none"}, "reward": dict(values)}
    return Config.from_text(json.dumps(recipe), "reward", overrides).reward


def judge_all(
    responses: Sequence[Response], options: RewardConfig, function: RewardFunctions | None = None
) -> Iterator[Judgment]:
    """Judge responses, each as a group of its own, in their order."""
    if uses_reward_model(options) and any(
        response.prompt.messages[-1]["content"] == NO_QUESTION for response in responses
    ):
        raise RewardError("reward.use: a reward model reads the question, too; give --prompt (from Python: prompt=...)")
    with closing(build_judge(options, function)) as judge:
        columns = {"data_source"}.union(*(response.prompt.extra for response in responses))
        has_tokens = all(response.tokens is not None for response in responses)
        kinds = judge_kinds(options, judge)
        check_columns(kinds, columns, has_tokens=has_tokens)
        needing = [name for name, kind in kinds if kind.gold is not None]
        if needing and not any_answers(response.prompt for response in responses):
            raise RewardError(
                f"reward.use: {needing[0]} needs the gold answer; give --answer (from Python: answer=...)"
            )
        futures = [judge.submit(response.prompt, [_rollout(response)]) for response in responses]
        for future in futures:
            yield _judgment(future.result()[0])


def split_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the response and the options of a command line, in which options may also come first."""
    place = next((place for place, argument in enumerate(arguments) if not _is_option(argument)), None)
    if place is None:
        raise ConfigError(f"there is no response, only options ({arguments[0]}); give the response first")
    return arguments[place], [*arguments[:place], *arguments[place + 1 :]]


def _is_option(argument: str) -> bool:
    key, equals, _ = argument.partition("=")
    return bool(equals) and key.startswith("reward.") and not any(char.isspace() for char in key)


def read_answer(text: str | None, options: RewardConfig) -> Any:
    """Return the gold answer of a command line. Rules compare text; other judges get what a row of JSON would hold."""
    if text is None or all(spec == AUTO or spec in RULES for spec in judge_specs(options)):
        return text
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return text if value is None else value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def typed(value: Any) -> str:
    """Return a value with the name of its type."""
    return f"{_shown(value)} ({type(value).__name__})"


def response_to(
    text: str,
    prompt: str | Sequence[Mapping[str, str]] | None,
    answer: Any,
    tokens: Sequence[int] | None = None,
    columns: Mapping[str, Any] | None = None,
) -> Response:
    """Return a response with a row made of these columns."""
    messages = prompt if prompt is None or isinstance(prompt, str) else [dict(message) for message in prompt]
    return Response(_prompt("the row", {"prompt": messages, "answer": answer, **(columns or {})}), text, tokens)


def read_responses(path: str, answer: Any = None) -> tuple[list[str], list[Response]]:
    """Read a dataset with a response in the column `completion`; return where each row is, and the responses.

    `answer` is the gold answer of rows without one, and `completion_ids` may be a column.
    """
    places, responses = [], []
    for where, row in read_rows(Source(path=path)):
        if isinstance(row, DataError):
            raise row
        text, tokens = row.get("completion"), row.get("completion_ids")
        if not isinstance(text, str):
            fault = "is missing" if text is None else f"must be text, found {type(text).__name__}"
            raise DataError(f"{where}: column 'completion' {fault} (columns: {', '.join(row)})")
        if tokens is not None and not (isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)):
            raise DataError(f"{where}: column 'completion_ids' must be a list of token ids")
        rest = {name: value for name, value in row.items() if name not in ("completion", "completion_ids")}
        places.append(where)
        responses.append(Response(_prompt(where, {"answer": answer} | rest), text, tokens))
    if not responses:
        raise DataError(f"{path}: no rows; expected one response per row")
    return places, responses


def describe(judgment: Judgment, answer: Any) -> dict[str, str]:
    """Return the parts of a judgment to show, by name, as text without control characters."""
    reason = judgment.error
    if judgment.verdict == "wrong":
        has_answer = judgment.extracted is not None or "extracted" not in judgment.extras
        reason = "no answer was found in the response"
        if has_answer:
            reason = None if answer is None else f"the gold answer is {_shown(answer)}"
    shown = {
        "score": None if judgment.score is None else f"{judgment.score:g}",
        "verdict": judgment.verdict,
        "extracted": None if judgment.extracted is None else _shown(judgment.extracted),
        "components": ", ".join(f"{name} {value:g}" for name, value in judgment.components.items()) or None,
        "reason": reason,
    }
    others = {
        name: _shown(value)
        for name, value in judgment.extras.items()
        if name.removeprefix(TERM) not in judgment.components and name != "extracted" and value not in (None, "")
    }
    return {name: text for name, text in (shown | others).items() if text is not None}


def summary(judgments: Iterable[Judgment]) -> str:
    found = list(judgments)
    scores = [judgment.score for judgment in found if judgment.score is not None]
    counts = {name: sum(j.verdict == name for j in found) for name in ("correct", "wrong", "unjudged")}
    parts = [f"{len(found):,} response{'s' * (len(found) != 1)}"]
    parts += [f"mean score {np.mean(scores):g}"] if scores else []
    return ", ".join(parts + [f"{count:,} {name}" for name, count in counts.items() if count])


def _prompt(where: str, row: Mapping[str, Any]) -> Prompt:
    has_question = any(row.get(name) is not None for name in QUESTION_COLUMNS)
    given = {name: value for name, value in row.items() if value is not None or name not in ("prompt", "answer")}
    row = given if has_question else {**given, "prompt": NO_QUESTION}
    return read_question(where, row, PromptFormat()).as_prompt()


def _rollout(response: Response) -> Rollout:
    tokens = np.array(response.tokens or (), np.int32)
    return Rollout(0, 0, tokens, np.zeros(len(tokens), np.float32), "stop", 0, response.text)


def _judgment(score: Score) -> Judgment:
    return Judgment(
        score.value, score.acc, score.extras.get("extracted"), score.error, score.components, dict(score.extras)
    )


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
