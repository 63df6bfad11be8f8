"""The dispatch of every kernel: Triton on a GPU, plain PyTorch elsewhere, behind one signature."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Kernel(Generic[P, R]):
    """A function with two implementations of the same signature.

    `torch` is the decorated function, the reference in plain PyTorch. `triton` is the function of the same name in the
    file `_<module>_triton.py` beside it. Calling the kernel picks one of them by its arguments.
    """

    def __init__(self, function: Callable[P, R], supports: Callable[..., bool]) -> None:
        self.torch = function
        self.supports = supports
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        room, _, module = function.__module__.rpartition(".")
        self._triton_module = f"{room}._{module}_triton"

    @property
    def triton(self) -> Callable[P, R]:
        # Imported on use, because Triton is not installed everywhere.
        return getattr(import_module(self._triton_module), self.__name__)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        chosen = self.triton if self.supports(*args, **kwargs) else self.torch
        return chosen(*args, **kwargs)


def on_cuda(first: Tensor, *_: object, **__: object) -> bool:
    return first.is_cuda


def kernel(function: Callable[P, R]) -> Kernel[P, R]:
    """Use Triton when the first argument is on a GPU."""
    return Kernel(function, on_cuda)


def kernel_where(supports: Callable[..., bool]) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Use Triton when `supports`, called with the same arguments, returns True."""
    return lambda function: Kernel(function, supports)
