"""The implementations of a kernel: PyTorch, C, and Triton on a GPU or in its interpreter (tests/conftest.py)."""

import pytest
import torch

from dapo.kernels import native

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

try:
    import triton.language as tl

    # Triton reads TRITON_INTERPRET when it is first imported, which may have been before conftest.py set it.
    HAS_TRITON = DEVICE == "cuda" or type(tl.sum).__name__ == "InterpretedFunction"
except ImportError:
    HAS_TRITON = False

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="no GPU, and Triton is missing or not interpreted")
both = pytest.mark.parametrize("how", ["torch", pytest.param("triton", marks=needs_triton)])


def needs_native_for(dtype: torch.dtype) -> pytest.MarkDecorator:
    """Skip a test without the kernels in C for a type. The first that calls one compiles them, or fails."""
    lack = native.missing(dtype)
    return pytest.mark.skipif(lack is not None, reason=f"no kernels in C: {lack}")


needs_native = needs_native_for(torch.bfloat16)
wide_native = pytest.param("native", marks=needs_native_for(torch.float32))
all_ways = pytest.mark.parametrize("how", ["torch", pytest.param("triton", marks=needs_triton), wide_native])
native_types = pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=needs_native_for(dtype), id=str(dtype)[6:]) for dtype in native.INSTRUCTIONS]
)
