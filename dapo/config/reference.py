"""Generates docs/reference/configuration.md: `python -m dapo.config.reference > docs/reference/configuration.md`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, get_args, get_origin

from dapo.config.base import Source
from dapo.config.schema import leaves


def options_markdown() -> str:
    """Return the page docs/reference/configuration.md: every option with its type, its default and its help."""
    page, heading = [_OPTIONS_INTRODUCTION], ""
    for name, info in leaves():
        if not name.startswith(f"{heading}."):
            heading = name.split(".", 1)[0]
            page.append(f"\n## {heading}\n\n| option | type | default | what it does |\n| --- | --- | --- | --- |\n")
        found = [(sign, getattr(m, key)) for m in info.metadata for key, sign in _BOUNDS if hasattr(m, key)]
        bounds = [f", {sign} {'2^63' if bound == 2**63 else bound}" for sign, bound in found]
        default = "required" if info.is_required() else f"`{_as_yaml(info.default)}`"
        is_fixed = isinstance(info.json_schema_extra, dict) and "fixed" in info.json_schema_extra
        text = f"{info.description}{' *Fixed.*' * is_fixed}"
        cells = [f"`{name}`", _type_text(info.annotation) + "".join(bounds), default, text]
        page.append("".join(f"| {cell.replace('|', _ESCAPED_BAR)} " for cell in cells) + "|\n")
    return "".join(page)


_OPTIONS_INTRODUCTION = """\
# Options

A YAML file holds the options of a run, by section. `dapo train recipe.yaml optim.lr=1e-5` overrides single options,
`--print-config` prints the result as YAML, and `--dry-run` checks it. Unknown keys, wrong types and contradictory
options are refused before a model is loaded. Relative paths start at the working directory. Options marked *fixed*
cannot change when a run is resumed. This page is generated from `dapo/config/*_options.py`.
"""
_ESCAPED_BAR = "\\|"
_BOUNDS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
_TYPES = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null", Any: "anything"}


def _type_text(kind: Any) -> str:
    if kind in _TYPES:
        return _TYPES[kind]
    members = [member for member in get_args(kind) if member is not Ellipsis]
    if get_origin(kind) is Literal:
        return ", ".join(f"`{member}`" for member in members)
    if get_origin(kind) is Annotated:
        return _type_text(members[0])
    if get_origin(kind) is tuple:
        return "list of " + ", ".join(map(_type_text, members))
    if get_origin(kind) is dict:
        return f"mapping of {_type_text(members[0])} to {_type_text(members[1])}"
    if kind is Source:
        return "text or {path, weight, size, params, columns}"
    return " or ".join(map(_type_text, members))


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    print(options_markdown(), end="")
