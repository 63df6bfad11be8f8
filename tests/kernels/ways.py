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
# The first test that calls a kernel compiles them, and fails where the compiler fails or takes too long.
needs_native = pytest.mark.skipif(native.missing() is not None, reason=f"no kernels in C: {native.missing()}")
