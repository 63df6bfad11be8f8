"""Building blocks of the configuration's sections: their base class, upper bounds, and the form of a dataset."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator

FromList = Strict(False)  # YAML has lists, not tuples
# Upper bounds far beyond any sensible run: a typing error is refused before it takes memory or days.
MOST_STEPS = 10**9
MOST_PROMPTS = 2**20
MOST_TOKENS = 2**24  # of one prompt or response
MOST_SAMPLES = 2**16  # of one prompt
MOST_PROCESSES = 2**14
MOST_TURNS = 2**10
MOST_SECONDS = 7 * 24 * 3600.0

PYTHON = "python:"  # begins the value of an option whose function or rows were given to Trainer as an object
_FILE_FUNCTION = re.compile(r".+\.py:[^\W\d]\w*", re.DOTALL)

FIXED: dict[str, Any] = {"fixed": True}  # marks an option that must not change when a run is resumed


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        hide_input_in_errors=True,  # it may contain a password
    )


class Source(Section):
    """One dataset, with its weight in the mix and the parameters of its reader."""

    path: str
    weight: float = Field(default=1.0, gt=0, le=1e9)
    size: int | None = Field(default=None, ge=1, le=10**7)
    params: dict[str, Any] = {}
    columns: dict[str, str] | None = None  # None: as data.columns says

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if self.columns and self.path.startswith("gym:"):
            raise ValueError("a gym task has no columns to rename; leave `columns` out")
        return self


def _source_list(value: Any) -> Any:
    """Accept one path, one mapping, or a list of either."""
    members = value if isinstance(value, list | tuple) else [value]
    return tuple({"path": member} if isinstance(member, str) else member for member in members)


def _named_sets(value: Any) -> Any:
    """Accept evaluation data without a name: it is one set, named after its first dataset."""
    if value is None or (isinstance(value, dict) and "path" not in value):
        return value
    members = _source_list(value)
    first = members[0] if members else None
    path = first.get("path") if isinstance(first, dict) else getattr(first, "path", None)
    return {Path(str(path).removeprefix("gym:")).stem: members}


Sources = Annotated[tuple[Source, ...], FromList, BeforeValidator(_source_list), Field(min_length=1)]
NamedSources = Annotated[dict[str, Sources] | None, BeforeValidator(_named_sets)]


def is_file_function(value: str) -> bool:
    return _FILE_FUNCTION.fullmatch(value) is not None


def built_in_or_file(*names: str) -> AfterValidator:
    """Return the check of an option that names a built-in function, or a function of the user in a file."""

    def check(value: str) -> str:
        if value in names or is_file_function(value) or value.startswith(PYTHON):
            return value
        raise ValueError(f"expected {', '.join([*names, ''])}{'or ' * bool(names)}path/to/file.py:function")

    return AfterValidator(check)
