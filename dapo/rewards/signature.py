"""The signature of a reward function: whose convention it follows, what it is called with, and what it needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dapo.errors import RewardError


@dataclass(frozen=True, slots=True)
class Convention:
    """A way to call reward functions. `provides`: the parameters that do not come from columns of the data."""

    usage: str
    provides: frozenset[str]
    is_batched: bool = False  # called once per group, with lists
    takes_columns: bool = True


_PARTS = {"thought", "reply"}  # of the response, for functions that name them
OURS = Convention(
    "reward(completion, answer, **row)",
    frozenset({"completion", "answer", "prompt", "data_source", "opens_thought", *_PARTS}),
)
VERL = Convention(
    "compute_score(data_source, solution_str, ground_truth, extra_info)",
    frozenset({"data_source", "solution_str", "ground_truth", "extra_info", *_PARTS}),
    takes_columns=False,
)
VERL_BATCHED = Convention(
    "compute_score(data_sources, solution_strs, ground_truths, extra_infos)",
    frozenset({"data_sources", "solution_strs", "ground_truths", "extra_infos", *_PARTS}),
    is_batched=True,
    takes_columns=False,
)
TRL = Convention(
    "f(prompts, completions, completion_ids, **columns)",
    frozenset(
        {
            *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
            *("answer", "ground_truth", "solution", "data_source"),
            *_PARTS,
        }
    ),
    is_batched=True,
)

# The parameter that tells the convention, in this order.
_TELLS = {
    "completions": TRL,
    "solution_strs": VERL_BATCHED,
    "solution_str": VERL,
    "completion": OURS,
    "completion_ids": TRL,
    "prompts": TRL,
}
TOKENS = "completion_ids"
ANSWER_COLUMNS = ("answer", "ground_truth", "solution")
_GOLD = (*ANSWER_COLUMNS, "ground_truths")


@dataclass(frozen=True, slots=True)
class Signature:
    convention: Convention
    names: frozenset[str]  # the parameters that can be given by name
    takes_everything: bool  # it has **kwargs
    bound: frozenset[str]  # arguments bound by partial; a column must not replace them
    needs: frozenset[str]  # columns that must exist; `completion_ids` counts as one, because text alone has none
    gold: str | None  # the parameter without a default that takes the gold answer

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """Recognize the convention by the parameter names; refuse a parameter that it cannot provide."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise RewardError(f"the reward {function!r} cannot be called as a function ({error})") from None
        takes_everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        convention = next((found for name, found in _TELLS.items() if name in names), TRL if takes_everything else None)
        if convention is None:
            usages = [each.usage for each in (OURS, VERL, VERL_BATCHED, TRL)]
            raise RewardError(
                f"the reward function takes ({', '.join(p.name for p in parameters)}); expected "
                f"{', '.join(usages[:-1])} or {usages[-1]}"
            )
        required = {
            p.name: p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        }
        for name, parameter in required.items():
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise RewardError(f"the reward function's parameter '{name}' is positional-only; remove the '/'")
            if name not in convention.provides and not convention.takes_columns:
                raise RewardError(
                    f"the reward function takes '{name}', which verl's {convention.usage} does not provide; give it "
                    "a default, or bind it with functools.partial"
                )
        bound = frozenset(function.keywords) if isinstance(function, partial) else frozenset()
        needs = frozenset(required) - (convention.provides - {TOKENS})
        gold = next((name for name in _GOLD if name in required and name in convention.provides), None)
        return cls(convention, names, takes_everything, bound, needs, gold)

    def select(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for one call."""
        if missing := sorted(self.needs - row.keys()):
            raise RewardError(f"the row has no column '{missing[0]}', which the reward function takes")
        taken = row if self.takes_everything else self.names & row.keys()
        return {name: row[name] for name in taken if name not in self.bound}


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of a reward function that its caller depends on. A worker reports them when it has loaded it."""

    is_batched: bool = False
    is_async: bool = False
    wants_tokens: bool = False
    needs: Sequence[str] = ()  # columns without which it cannot be called
    sees: Sequence[str] | None = ()  # columns by which it can tell rows apart, besides the gold answer; None: all
    patience: float = 1.0  # the pool waits this many times reward.timeout; more for a reward that limits itself
    gold: str | None = None  # the parameter for the gold answer, if it cannot be called without one

    @property
    def is_sequential(self) -> bool:
        return not self.is_batched and not self.is_async


def kind_of(function: Callable[..., Any], signature: Signature, *, is_rule: bool = False) -> Kind:
    """Describe a function. A rule ignores the columns that it does not name, even if it takes `**row`."""
    convention = signature.convention
    names = sorted({*signature.names, *getattr(function, "columns", ())})
    if not convention.takes_columns:
        names = ["data_source", "extra_info"]
    elif signature.takes_everything and not is_rule:
        names = None
    return Kind(
        is_batched=convention.is_batched,
        is_async=any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))),  # noqa: B004
        wants_tokens=convention is TRL and (signature.takes_everything or TOKENS in signature.names),
        needs=sorted(signature.needs),
        sees=names,
        patience=float(getattr(function, "patience", 1.0)),
        gold=signature.gold if getattr(function, "needs_gold", True) else None,
    )
