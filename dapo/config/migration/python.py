"""Reads the arguments that a Python file gives to TRL's GRPOConfig and GRPOTrainer, without running anything."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dapo.config.migration.shell import UNKNOWN

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LARGEST = 2**63
_LORA_DEFAULTS = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": None}  # of PEFT
_LORA_NAMES = {name: f"lora_{name.removeprefix('lora_')}" for name in _LORA_DEFAULTS}


class PythonFile:
    """A file with its constants, imports and calls."""

    def __init__(self, tree: ast.Module, source: str) -> None:
        self.source = source
        nodes = sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0))
        self.assigned = dict(_assignments(nodes))
        self.values: dict[str, Any] = {}  # names that have the same value wherever they are set
        for name, node in _assignments(nodes):
            value = UNKNOWN if node is None else self._value(node)
            is_same = name not in self.values or self.values[name] == value
            self.values[name] = value if is_same else UNKNOWN
        self.imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module and not node.level
            for alias in node.names
        }
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.given: dict[str, Any] = {}
        self.notes = [
            "the dataset is loaded in Python: write its rows to a file, or use dapo's Trainer, which takes them as "
            "they are"
        ]

    def arguments(self) -> tuple[dict[str, Any], list[str]]:
        """Return the options by TRL's names, and notes about what could not be read."""
        configs = [call for call in self.calls if _called(call) == "GRPOConfig"]
        if len(configs) > 1:
            lines = ", ".join(str(call.lineno) for call in configs)
            self.notes.append(
                f"GRPOConfig is called in lines {lines}; of an argument that is given twice, the last counts"
            )
        for call in configs:
            self._note_unnamed(call)
            self.given |= {keyword.arg: self._value(keyword.value) for keyword in call.keywords if keyword.arg}
        for call in self.calls:
            if _called(call) == "GRPOTrainer":
                self._note_unnamed(call)
                for keyword in call.keywords:
                    self._read_trainer(keyword)
        return self.given, self.notes

    def _note_unnamed(self, call: ast.Call) -> None:
        unnamed = [ast.unparse(argument) for argument in call.args]
        unnamed += [f"**{ast.unparse(keyword.value)}" for keyword in call.keywords if keyword.arg is None]
        if unnamed:
            shown = ", ".join(unnamed)
            self.notes.append(f"{_called(call)} in line {call.lineno} has arguments that could not be read: {shown}")

    def _read_trainer(self, keyword: ast.keyword) -> None:
        if keyword.arg == "model":
            self.given["model_name_or_path"] = self._value(keyword.value)
        elif keyword.arg == "reward_funcs":
            functions = keyword.value.elts if isinstance(keyword.value, ast.List) else [keyword.value]
            self.given["reward_funcs"] = [self._reward(each) for each in functions]
        elif keyword.arg == "peft_config":
            self._read_adapters(keyword.value)
        elif keyword.arg not in ("args", "train_dataset", None):
            self.notes.append(f"the argument {keyword.arg} of GRPOTrainer in line {keyword.lineno} is not converted")

    def _read_adapters(self, node: ast.expr) -> None:
        """Read a LoraConfig as the options of `trl grpo`, with PEFT's defaults."""
        if isinstance(node, ast.Name):
            node = self.assigned.get(node.id) or node
        if isinstance(node, ast.Constant) and node.value is None:
            return
        if not isinstance(node, ast.Call) or _called(node) != "LoraConfig":
            self.given["peft_config"] = UNKNOWN
            return
        self._note_unnamed(node)
        given = {keyword.arg: self._value(keyword.value) for keyword in node.keywords if keyword.arg}
        self.given["use_peft"] = True
        for name, value in (_LORA_DEFAULTS | given).items():
            self.given[_LORA_NAMES.get(name, f"peft_config.{name}")] = value

    def _reward(self, node: ast.expr) -> Any:
        """Return a reward function as `trl grpo` would name it, or as file.py:function if it is defined here."""
        if not isinstance(node, ast.Name):
            return self._value(node)
        if node.id in self.imported:
            return self.imported[node.id]
        if node.id in self.assigned:
            return self.values[node.id]
        note = (
            f"reward.use points at {self.source}: dapo imports that file to load the function, so its top-level "
            "code runs; move the function into a file of its own"
        )
        if note not in self.notes:
            self.notes.append(note)
        return f"{self.source}:{node.id}"

    def _value(self, node: ast.expr) -> Any:
        """Return the value of a constant, or of constants that are put together; UNKNOWN if it has to be run."""
        if isinstance(node, ast.Name):
            return self.values.get(node.id, UNKNOWN)
        if isinstance(node, ast.List | ast.Tuple):
            members = [self._value(member) for member in node.elts]
            return UNKNOWN if UNKNOWN in members else members
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self._value(node.left), self._value(node.right)
            if not all(type(side) in (int, float) and abs(side) < _LARGEST for side in (left, right)):
                return UNKNOWN
            try:
                return _OPERATORS[type(node.op)](left, right)
            except (ZeroDivisionError, OverflowError):
                return UNKNOWN
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, RecursionError, MemoryError):
            return UNKNOWN


def _assignments(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names that are set, with the expression; None if it is not a plain assignment."""
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value
        elif isinstance(node, ast.AugAssign | ast.For) and isinstance(node.target, ast.Name):
            yield node.target.id, None


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
