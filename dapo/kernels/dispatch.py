"""The dispatch of every kernel: Triton on a GPU, C on a CPU with AVX-512, else PyTorch, behind one signature."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar

from torch import Tensor

from dapo.kernels import native

P = ParamSpec("P")
R = TypeVar("R")


class Kernel(Generic[P, R]):
    """A function with up to three implementations of the same signature.

    `torch` is the decorated function, the reference in plain PyTorch. `triton` is the function of the same name in the
    file `_<module>_triton.py` beside it. `native` is that of native.py. Calling the kernel picks one of them by its
    arguments.
    """

    def __init__(
        self, function: Callable[P, R], supports: Callable[..., bool], supports_native: Callable[..., bool] | None
    ) -> None:
        self.torch = function
        self.supports, self.supports_native = supports, supports_native
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        room, _, module = function.__module__.rpartition(".")
        self._triton_module = f"{room}._{module}_triton"

    @property
    def triton(self) -> Callable[P, R]:
        # Imported on use, because Triton is not installed everywhere.
        return getattr(import_module(self._triton_module), self.__name__)

    @property
    def native(self) -> Callable[P, R]:
        return getattr(native, self.__name__)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.supports(*args, **kwargs):
            return self.triton(*args, **kwargs)
        if self.supports_native is not None and self.supports_native(*args, **kwargs):
            return self.native(*args, **kwargs)
        return self.torch(*args, **kwargs)


def on_cuda(first: Tensor, *_: object, **__: object) -> bool:
    return first.is_cuda


def kernel(function: Callable[P, R]) -> Kernel[P, R]:
    """Use Triton when the first argument is on a GPU."""
    return Kernel(function, on_cuda, None)


def kernel_where(
    supports: Callable[..., bool], native: Callable[..., bool] | None = None
) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Use Triton, or C, where `supports` or `native`, called with the same arguments, returns True."""
    return lambda function: Kernel(function, supports, native)
