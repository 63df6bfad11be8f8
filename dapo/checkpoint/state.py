"""The trainer's state and its JSON form, whose types are checked strictly when it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from dapo.types import Drawn, FinishReason, Group, Outlook, Prompt, Rollout, Score, Verdict

FORMAT = 5  # raise it when a resume could misread an older state.json
STATE_FILE = "trainer/state.json"


@dataclass(frozen=True, slots=True)
class Best:
    """The step with the best evaluation so far, and the metric that it was chosen by."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True, slots=True, eq=False)
class DrawerState:
    """The part of the state that decides which prompts are drawn next."""

    positions: list[int]  # one per data source: prompts drawn so far
    data_digest: str  # of the data that the positions index into
    considered: int  # random decisions of the ledger so far
    ledger: Mapping[str, Sequence[int]]
    known: list[Prompt] = field(default_factory=list)  # may be drawn again; the first was drawn longest ago
    drawn: int = 0  # prompts drawn so far
    revisited: int = 0  # how many of them were drawn again
    forecast: list[float] = field(default_factory=list)  # sums of the regression that predicts pass rates
    forecast_errors: Mapping[str, float] = field(default_factory=dict)  # by uid: latest pass rate minus its forecast


@dataclass(frozen=True, slots=True, eq=False)
class SamplerState:
    """The sampler's part of the state."""

    drawer: DrawerState
    next_serial: int
    recent: list[bool]  # whether each of the latest groups was kept; sizes the next round
    carried: list[Group]
    pending: Mapping[int, Drawn] = field(default_factory=dict)  # by serial: in flight when saved, submitted again


@dataclass(frozen=True, slots=True, eq=False)
class TrainerState:
    """Everything the next step depends on besides weights and optimizer.

    There is no random generator to save: all randomness is hashed from the seed and these counters.
    """

    step: int
    version: int  # of the weights: steps so far that made an update
    empty_in_a_row: int
    non_finite_in_a_row: int
    sampler: SamplerState
    best: Best | None = None


class _PromptData(TypedDict):
    uid: str
    messages: list[dict[str, Any]]
    tokens: list[int]
    answer: Any
    data_source: str
    extra: dict[str, Any]
    is_text: bool
    opens_thought: bool


class _RolloutData(TypedDict):
    serial: int
    index: int
    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_version: int
    text: str
    switches: list[int]
    given: list[Annotated[list[int], Field(min_length=2, max_length=2)]]
    turns: list[dict[str, Any]]


class _ScoreData(TypedDict):
    value: float | None
    acc: bool | float | None
    error: str | None
    extras: dict[str, Any]


class _GroupData(TypedDict):
    serial: int
    prompt: _PromptData
    rollouts: list[_RolloutData]
    scores: list[_ScoreData]
    rewards: list[float]
    advantages: list[float]
    trains: list[bool]
    verdict: str
    ref_logprobs: list[list[float]] | None
    chance: float


class _OutlookData(TypedDict):
    features: list[float]
    forecast: float | None


class _PendingData(TypedDict):
    serial: int
    prompt: _PromptData
    chance: float
    outlook: _OutlookData | None


class _BestData(TypedDict):
    step: int
    metric: str
    value: float


class _StateData(TypedDict):
    """The types of state.json."""

    step: int
    version: int
    positions: list[int]
    data_digest: str
    next_serial: int
    recent: list[bool]
    empty_in_a_row: int
    non_finite_in_a_row: int
    considered: int
    ledger: dict[str, list[int]]
    known: list[_PromptData]
    drawn: int
    revisited: int
    forecast: list[float]
    forecast_errors: dict[str, float]
    carried: list[_GroupData]
    pending: list[_PendingData]
    best: _BestData | None


_CHECKED_STATE = TypeAdapter(_StateData)


def to_document(state: TrainerState) -> dict[str, Any]:
    """Return the content of state.json, with the values of all parts on one level."""
    sampler = state.sampler
    return {
        "format": FORMAT,
        **_plain(state, leave_out=("sampler", "best")),
        **_plain(sampler, leave_out=("drawer", "carried", "pending")),
        **_plain(sampler.drawer, leave_out=("known",)),
        "known": [asdict(prompt) for prompt in sampler.drawer.known],
        "carried": [_group_to_json(group) for group in sampler.carried],
        "pending": [_pending_to_json(serial, drawn) for serial, drawn in sampler.pending.items()],
        "best": asdict(state.best) if state.best else None,
    }


def _plain(record: Any, leave_out: Sequence[str]) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record) if f.name not in leave_out}


def from_document(document: dict[str, Any]) -> TrainerState:
    """Build the state from the content of state.json, without its `format`; a ValueError names the first bad field."""
    try:
        _CHECKED_STATE.validate_python(document, strict=True, extra="forbid")
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, fault['loc']))} in {STATE_FILE}: {fault['msg']}") from None
    document["carried"] = [_group_from_json(group) for group in document["carried"]]
    document["known"] = [_prompt(prompt) for prompt in document["known"]]
    document["pending"] = {item["serial"]: _drawn(item) for item in document["pending"]}
    best = best_from_json(document.pop("best"))
    drawer = DrawerState(**{f.name: document.pop(f.name) for f in fields(DrawerState)})
    others = {f.name: document.pop(f.name) for f in fields(SamplerState) if f.name in document}
    sampler = SamplerState(drawer=drawer, **others)
    return TrainerState(**document, sampler=sampler, best=best)


def best_from_json(values: Any) -> Best | None:
    return None if values is None else Best(int(values["step"]), str(values["metric"]), float(values["value"]))


def _pending_to_json(serial: int, drawn: Drawn) -> dict[str, Any]:
    outlook = drawn.outlook
    return {
        "serial": serial,
        "prompt": asdict(drawn.prompt),
        "chance": drawn.chance,
        "outlook": outlook and {"features": outlook.features_K.tolist(), "forecast": outlook.forecast},
    }


def _drawn(data: Mapping[str, Any]) -> Drawn:
    outlook = data["outlook"]
    known = outlook and Outlook(np.array(outlook["features"], np.float64), outlook["forecast"])
    return Drawn(_prompt(data["prompt"]), data["chance"], known)


def _group_to_json(group: Group) -> dict[str, Any]:
    def lists(values: tuple[np.ndarray, ...] | None) -> list[list[float]] | None:
        return None if values is None else [value.tolist() for value in values]

    return {
        "serial": group.serial,
        "prompt": asdict(group.prompt),
        "rollouts": [
            {**asdict(rollout), "tokens": rollout.tokens.tolist(), "logprobs": rollout.logprobs.tolist()}
            for rollout in group.rollouts
        ],
        "scores": [asdict(score) for score in group.scores],
        "rewards": group.rewards.tolist(),
        "advantages": group.advantages.tolist(),
        "trains": group.trains.tolist(),
        "verdict": group.verdict,
        "ref_logprobs": lists(group.ref_logprobs),
        "chance": group.chance,
    }


def _prompt(data: Mapping[str, Any]) -> Prompt:
    return Prompt(**{**data, "messages": tuple(data["messages"]), "tokens": tuple(data["tokens"])})


def _rollout(data: Mapping[str, Any]) -> Rollout:
    arrays = {"tokens": np.array(data["tokens"], np.int32), "logprobs": np.array(data["logprobs"], np.float32)}
    given = tuple((start, end) for start, end in data["given"])
    rest = {"switches": tuple(data["switches"]), "given": given, "turns": tuple(data["turns"])}
    return Rollout(**{**data, **arrays, **rest})


def _group_from_json(data: Mapping[str, Any]) -> Group:
    reference = data["ref_logprobs"]
    return Group(
        serial=data["serial"],
        prompt=_prompt(data["prompt"]),
        rollouts=tuple(map(_rollout, data["rollouts"])),
        scores=tuple(Score(**score) for score in data["scores"]),
        rewards=np.array(data["rewards"], np.float64),
        advantages=np.array(data["advantages"], np.float64),
        trains=np.array(data["trains"], bool),
        verdict=Verdict(data["verdict"]),
        ref_logprobs=None if reference is None else tuple(np.array(row, np.float32) for row in reference),
        chance=data["chance"],
    )
