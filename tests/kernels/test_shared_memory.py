"""The shared memory that the attention kernels need, compiled for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.ways import HAS_TRITON

ROOT = Path(__file__).parent.parent.parent
GPU = 89, 101_376  # compute capability and bytes of shared memory per program: an RTX 4090, an L4; others have no less
# Triton's interpreter, which the tests of this process use, cannot compile.
SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dapo.kernels import _decode_attention_triton as decode, _piece_attention_triton as piece
from dapo.kernels.piece_attention import CHUNK, PAGE

def shared(kernel, pointers, warps, stages, **constants):
    names = {name: kind for kind, group in pointers for name in group.split()}
    kinds = {name: "constexpr" if name in constants else names.get(name, "i32") for name in kernel.arg_names}
    aligned = [name for name, kind in kinds.items() if kind[0] == "*" or name.endswith(("_place", "_head", "_token"))]
    place = kernel.arg_names.index
    source = ASTSource(
        kernel, kinds, {(place(name),): value for name, value in constants.items()},
        {(place(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    return triton.compile(source, target, {"num_warps": warps, "num_stages": stages}).metadata.shared

size, width = int(sys.argv[2]), {"bf16": 2, "fp32": 4}[sys.argv[3]]
numbers, sizes = "*" + sys.argv[3], {"GROUP": 4, "HEAD_DIM": size, "DIMS": size, "PAGE": PAGE, "CHUNK": CHUNK}
pointers = [
    (numbers, "query key value keys values output"), ("*fp32", "cos_sin sums peaks lse"), ("fp32", "scale"),
    ("*i32", "rows_B table prompt_lengths own_lengths"),
    ("*i32", "starts lengths prefix_starts prefix_lengths joint_starts joint_lengths"),
]
launch = decode.warps_and_stages(PAGE * size * width)
print(shared(decode._attend, pointers, *launch, ROWS=16, SPLIT=False, **sizes))
if width == 2:  # packed attention in float32 has no kernel of its own
    launch = piece.NUM_WARPS, piece.NUM_STAGES
    print(shared(piece._attend, pointers, *launch, ROWS=piece.rows_for(size), **sizes))
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is missing")
@pytest.mark.parametrize(("size", "numbers"), [(128, "bf16"), (256, "bf16"), (128, "fp32"), (256, "fp32")])
def test_attention_needs_no_more_shared_memory_than_a_gpu_for_desktops_has(size, numbers, tmp_path):
    capability, most = GPU
    values = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, str(capability), str(size), numbers]
    environment = values | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    needed = [int(line) for line in done.stdout.split()]
    assert len(needed) == (2 if numbers == "bf16" else 1)
    assert max(needed) <= most
