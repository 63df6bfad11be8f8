"""Kernels in C for CPUs with AVX-512 (_native.c), in float32 and bf16, compiled on first use for each type.

Where the CPU lacks the instructions, or there is no C compiler, PyTorch computes instead. With DAPO_AMX=1, products of
bf16 use AMX if the CPU has it. That has been tested with emulated instructions only, so it is not the default.

A result depends on its own row only, so a token's bits are the same in sampling and in training, alone or in any batch,
with any number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dapo.errors import ConfigError, DapoError
from dapo.system.cache import cache_dir
from dapo.system.files import atomic_folder

if TYPE_CHECKING:
    from dapo.kernels.rotary import HeadNorms

SOURCE = Path(__file__).with_name("_native.c")
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
INSTRUCTIONS = {torch.float32: _AVX512, torch.bfloat16: _AVX512 | {"avx512_bf16"}}  # that the kernels of a type need
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 256)  # multiples of 16, up to 256
# OpenMP is not linked: its functions are found in the library that PyTorch has loaded, so both use the same threads.
_COMPILE = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-c")
_LIBRARY, _DIGEST = "native.so", "digest"  # files of a folder in the cache
_PATIENCE = 300  # seconds that a call of the compiler may take
_ROWS = 64  # of one block of a product
_TERMS = 32  # of a tile; with AMX, a product is fast where its number of terms is a multiple
_MASSES = 256  # tokens whose probabilities are added up first, in float32, when a token is drawn
_INTEGER, _FLOAT = ctypes.c_int64, ctypes.c_float
_NARROW, _WIDE, _ADD = map(ctypes.c_int, range(3))  # the kind of a product's result


def missing(dtype: torch.dtype) -> str | None:
    """Return what this machine lacks for the kernels of a type, or None. Nothing is compiled."""
    if not has_instructions(dtype):
        return f"this CPU has no AVX-512{' bf16' * (dtype == torch.bfloat16)}"
    if _compiler() is None:
        return f"the C compiler {os.environ.get('CC') or 'cc'} was not found; install one, such as gcc, or set CC"
    return None


def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the compiled kernels of a type, or None where there are none."""
    found = _loaded(dtype) if dtype in INSTRUCTIONS else None
    return found if isinstance(found, ctypes.CDLL) else None


def obstacle(dtype: torch.dtype) -> str | None:
    """Return why there are no kernels of a type, or None. They are compiled if they have not been yet."""
    found = _loaded(dtype)
    return found if isinstance(found, str) else None


@functools.cache
def _loaded(dtype: torch.dtype) -> ctypes.CDLL | str:
    """Return the compiled kernels of a type, or why there are none."""
    if (lack := missing(dtype)) is not None:
        return lack
    try:
        path = _compiled(dtype)
    except DapoError as error:  # the compiler fails, there is no cache, or its disk is full
        return str(error)
    except OSError as error:
        return f"{error}; set DAPO_CACHE to a folder that can be written"
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:  # such as a function of another OpenMP than PyTorch's, or a disk mounted as noexec
        return (
            f"the compiled kernels cannot be loaded ({error}); "
            "set CC=gcc, or DAPO_CACHE to a folder from which libraries can be loaded"
        )
    if dtype == torch.bfloat16 and os.environ.get("DAPO_AMX") == "1":
        found.allow_tiles()
    return found


def is_native(*tensors: Tensor | None) -> bool:
    """Return whether the kernels take these tensors: of one type that has kernels, in main memory."""
    present = [tensor for tensor in tensors if tensor is not None]
    # Other types, such as the DTensors of shards, have no memory of their own to point to.
    is_plain = all(type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu" for each in present)
    is_alike = len({each.dtype for each in present}) == 1
    return is_plain and is_alike and library(present[0].dtype) is not None


def can_multiply(input_Ti: Tensor, weight_oi: Tensor) -> bool:
    if len(input_Ti) == 0 or not weight_oi.is_contiguous() or not is_native(input_Ti, weight_oi):
        return False
    return input_Ti.shape[1] % _per_unit(input_Ti) == 0


def can_attend(dtype: torch.dtype, device: torch.device, head_dim: int) -> bool:
    return device.type == "cpu" and head_dim in HEAD_SIZES and library(dtype) is not None


def product(input_Ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None = None, *, is_wide: bool = False) -> Tensor:
    """Return input @ weight.T + bias, in the type of the input, or in float32 if `is_wide`."""
    out = torch.empty(len(input_Ti), len(weight_oi), dtype=torch.float32 if is_wide else input_Ti.dtype)
    _multiply(input_Ti, weight_oi, bias_o, out, _WIDE if is_wide else _NARROW)
    return out


def plain_product(left_Ti: Tensor, right_io: Tensor) -> Tensor:
    """Return left @ right. Both are float32."""
    out = torch.empty(len(left_Ti), right_io.shape[1])
    _multiply_plain(left_Ti, right_io, out, adds=False)
    return out


def add_product(total_ab: Tensor, left_Ta: Tensor, right_Tb: Tensor) -> None:
    """Add left.T @ right to a float32 total."""
    assert total_ab.dtype == torch.float32, "the total must be in float32"
    if left_Ta.dtype == torch.float32:
        _multiply_plain(left_Ta.t(), right_Tb, total_ab, adds=True)
        return
    if rest := -len(left_Ta) % _TERMS:
        left_Ta, right_Tb = (F.pad(each, (0, 0, 0, rest)) for each in (left_Ta, right_Tb))
    _multiply(left_Ta.t().contiguous(), right_Tb.t().contiguous(), None, total_ab, _ADD)


def _multiply(input_Ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None, out: Tensor, kind: ctypes.c_int) -> None:
    (rows, terms), dtype, per_unit = input_Ti.shape, input_Ti.dtype, _per_unit(input_Ti)
    assert dtype in INSTRUCTIONS and weight_oi.dtype == dtype, "both factors must be in float32 or in bfloat16"
    assert weight_oi.shape[1] == terms, "both factors must have the same number of terms"
    assert terms % per_unit == 0, "the number of terms must be even"
    assert weight_oi.is_contiguous() and out.is_contiguous(), "weight and result must be contiguous"
    assert out.shape == (rows, len(weight_oi)), "the result must have a row per input, and a column per row of weight"
    assert bias_o is None or bias_o.dtype == dtype, "the bias must have the type of the factors"
    assert bias_o is None or bias_o.shape == (len(weight_oi),), "the bias must have a term per row of the weight"
    assert bias_o is None or bias_o.is_contiguous(), "the bias must be contiguous"
    input_Ti = _with_rows(input_Ti)
    packed = torch.empty(-(-rows // _ROWS) * _ROWS, terms, dtype=dtype)
    _library(dtype).product(
        _at(input_Ti), _INTEGER(input_Ti.stride(0)), _at(weight_oi), _at(bias_o), _at(out), kind, _at(packed),
        _INTEGER(rows), _INTEGER(len(weight_oi)), _INTEGER(terms),
    )  # fmt: skip


def _multiply_plain(left_Ti: Tensor, right_io: Tensor, out: Tensor, *, adds: bool) -> None:
    assert left_Ti.dtype == right_io.dtype == out.dtype == torch.float32, "factors and result must be in float32"
    assert left_Ti.shape[1] == len(right_io), "both factors must have the same number of terms"
    assert out.shape == (len(left_Ti), right_io.shape[1]), "the result must have a row per row of the left factor"
    assert out.is_contiguous(), "the result must be contiguous"
    right_io, left_Ti = right_io.contiguous(), left_Ti if 1 in left_Ti.stride() else left_Ti.contiguous()
    is_done = _library(torch.float32).plain_product(
        _at(left_Ti), *map(_INTEGER, left_Ti.stride()), _at(right_io), _at(out), ctypes.c_int(adds),
        _INTEGER(len(left_Ti)), _INTEGER(right_io.shape[1]), _INTEGER(len(right_io)),
    )  # fmt: skip
    if not is_done:
        raise MemoryError("no memory for a product")


def _per_unit(tensor: Tensor) -> int:
    """Return how many numbers the kernels multiply at once in a lane of 32 bits."""
    return 4 // tensor.element_size()


def add_rms_norm(
    residual_Td: Tensor, delta_Td: Tensor | None, weight_d: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = residual_Td.shape
    residual_Td, delta_Td = residual_Td.contiguous(), None if delta_Td is None else delta_Td.contiguous()
    normed_Td, rstd_T = torch.empty(rows, width, dtype=weight_d.dtype), torch.empty(rows)
    total_Td = residual_Td if delta_Td is None else torch.empty_like(residual_Td)
    _library(weight_d.dtype).add_rms_norm(
        _at(residual_Td), _at(delta_Td), _at(weight_d), _FLOAT(eps), _at(normed_Td), _at(total_Td), _at(rstd_T),
        _INTEGER(rows), _INTEGER(width),
    )  # fmt: skip
    return normed_Td, total_Td, rstd_T


def swiglu(gate_up_T2i: Tensor) -> Tensor:
    rows, width = len(gate_up_T2i), gate_up_T2i.shape[1] // 2
    out_Ti = torch.empty(rows, width, dtype=gate_up_T2i.dtype)
    _library(out_Ti.dtype).swiglu(_at(gate_up_T2i.contiguous()), _at(out_Ti), _INTEGER(rows), _INTEGER(width))
    return out_Ti


def swiglu_backward(gate_up_T2i: Tensor, grad_Ti: Tensor) -> tuple[Tensor, Tensor]:
    gate_up_T2i, grad_Ti = gate_up_T2i.contiguous(), grad_Ti.contiguous()
    active_Ti, grad_T2i = torch.empty_like(grad_Ti), torch.empty_like(gate_up_T2i)
    _library(grad_Ti.dtype).swiglu_backward(
        _at(gate_up_T2i), _at(grad_Ti), _at(active_Ti), _at(grad_T2i), *map(_INTEGER, grad_Ti.shape)
    )
    return active_Ti, grad_T2i


def round_dithered(wide_oi: Tensor, out_oi: Tensor, base_oi: Tensor | None = None) -> None:
    _library(torch.bfloat16).round_dithered(_at(wide_oi), _at(base_oi), _at(out_oi), _INTEGER(wide_oi.numel()))


def rotate(
    qkv_T: Tensor, positions_T: Tensor, table: Tensor | None, heads: int, kv_heads: int, norms: HeadNorms | None
) -> Tensor:
    head_dim = qkv_T.shape[1] // (heads + 2 * kv_heads)
    columns = (heads + kv_heads) * head_dim
    out_T = qkv_T[:, :columns] if norms is None else qkv_T.new_empty(len(qkv_T), columns)
    positions_T = positions_T.long().contiguous()
    _library(qkv_T.dtype).rotate(
        _at(qkv_T), _INTEGER(qkv_T.stride(0)), _at(out_T), _INTEGER(out_T.stride(0)), _at(positions_T), _at(table),
        _at(norms and norms.query_D), _at(norms and norms.key_D), _FLOAT(norms.eps if norms else 0),
        _INTEGER(len(qkv_T)), _INTEGER(heads), _INTEGER(kv_heads), _INTEGER(head_dim),
    )  # fmt: skip
    return out_T


class _CSource(ctypes.Structure):
    tensors: tuple[Tensor, ...]
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "starts", "counts")),
        *((name, _INTEGER) for name in ("token_stride", "head_stride")),
    )


class Spans:
    """The tokens that queries attend to: for query t, `counts[t]` tokens from element `starts[t]` of a cache on."""

    def __init__(self, starts_T: Tensor, counts_T: Tensor) -> None:
        assert starts_T.dtype == counts_T.dtype == torch.int64
        self.starts_T, self.counts_T = starts_T.contiguous(), counts_T.contiguous()

    def of(self, keys: Tensor, values: Tensor, token_stride: int, head_stride: int) -> _CSource:
        """Return the spans in these keys and values."""
        assert keys.dtype == values.dtype, "keys and values must have the same type"
        assert keys.shape == values.shape, "keys and values must have the same shape"
        tensors = keys, values, self.starts_T, self.counts_T
        source = _CSource(*(tensor.data_ptr() for tensor in tensors), token_stride, head_stride)
        source.tensors = tensors  # keep them alive
        return source


def attention(
    query_THD: Tensor, sources: tuple[_CSource, _CSource], kv_heads: int, longest: int, scale: float
) -> Tensor:
    """Return the output [T, H, D] of attention to the tokens of both sources, at most `longest` for each query."""
    (tokens, heads, head_dim), dtype = query_THD.shape, query_THD.dtype
    assert all(each.dtype == dtype for source in sources for each in source.tensors[:2]), (
        "queries must have the type of the keys"
    )
    assert head_dim in HEAD_SIZES, f"a head size of {head_dim} has no kernel"
    query_THD = with_heads(query_THD)
    out_THD = torch.empty(tokens, heads, head_dim, dtype=dtype)
    is_done = _library(dtype).attention(
        _at(query_THD), _INTEGER(query_THD.stride(0)), ctypes.byref((_CSource * 2)(*sources)), _INTEGER(longest),
        _FLOAT(scale), _at(out_THD), _INTEGER(tokens), _INTEGER(heads), _INTEGER(kv_heads), _INTEGER(head_dim),
    )  # fmt: skip
    if not is_done:
        raise MemoryError(f"no memory for the attention scores of {longest} tokens")
    return out_THD


def store(key_THD: Tensor, value_THD: Tensor, keys: Tensor, values: Tensor, places_T: Tensor, head_stride: int) -> None:
    """Copy the keys and values of tokens to the given elements of a cache."""
    key_THD, value_THD = with_heads(key_THD), with_heads(value_THD)
    if key_THD.stride(0) != value_THD.stride(0):
        key_THD, value_THD = key_THD.contiguous(), value_THD.contiguous()
    assert key_THD.dtype == value_THD.dtype == keys.dtype == values.dtype, "the types must be those of the cache"
    _library(keys.dtype).store(
        _at(key_THD), _at(value_THD), _INTEGER(key_THD.stride(0)), _at(keys), _at(values), _at(places_T),
        _INTEGER(head_stride), *map(_INTEGER, key_THD.shape),
    )  # fmt: skip


def draw(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return tokens and their log-probabilities, as `sampler.draw` does without truncation."""
    rows, vocabulary = logits_BV.shape
    tokens_B, logprobs_B = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    sums = torch.empty(rows, -(-vocabulary // _MASSES), dtype=torch.float64)
    _library(torch.float32).draw(
        _at(logits_BV.contiguous()), _at(uniforms_B.contiguous()), _FLOAT(temperature), _at(sums), _at(tokens_B),
        _at(logprobs_B), _INTEGER(rows), _INTEGER(vocabulary),
    )  # fmt: skip
    return tokens_B, logprobs_B


def with_heads(tensor_THD: Tensor) -> Tensor:
    """Return the tensor with the heads of a token next to each other in memory."""
    is_dense = tensor_THD.stride(2) == 1 and tensor_THD.stride(1) == tensor_THD.shape[2]
    return tensor_THD if is_dense else tensor_THD.contiguous()


def _with_rows(tensor_Ti: Tensor) -> Tensor:
    return tensor_Ti if tensor_Ti.stride(1) == 1 else tensor_Ti.contiguous()


class _Pointer(ctypes.c_void_p):
    """An address that keeps its tensor alive, which may be a temporary, until the call has returned."""

    tensor: Tensor | None


def _at(tensor: Tensor | None) -> _Pointer:
    pointer = _Pointer(None if tensor is None else tensor.data_ptr())
    pointer.tensor = tensor
    return pointer


def _library(dtype: torch.dtype) -> ctypes.CDLL:
    found = library(dtype)
    assert found is not None, obstacle(dtype)
    return found


def _compiler() -> tuple[str, ...] | None:
    """Return the command of the C compiler, which may have arguments, or None if it is not installed."""
    try:
        command = shlex.split(os.environ.get("CC") or "cc")
    except ValueError:  # an open quotation mark
        return None
    return tuple(command) if command and shutil.which(command[0]) else None


def has_instructions(dtype: torch.dtype) -> bool:
    return cpu_flags() >= INSTRUCTIONS[dtype]


@functools.cache
def cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())


def _options(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the options of the compiler, among them the type and the sizes that the source shares with this file."""
    sizes = {"ROWS": _ROWS, "TERMS": _TERMS, "MASSES": _MASSES}
    heads = " ".join(f"DO({size})" for size in HEAD_SIZES)
    macros = [f"{name}={size}" for name, size in sizes.items()] + ["BF16"] * (dtype == torch.bfloat16)
    return (*_COMPILE, *(f"-D{macro}" for macro in macros), f"-DFOR_HEAD_SIZES(DO)={heads}")


def _key(compiler: tuple[str, ...], dtype: torch.dtype) -> str:
    """Return a digest of what determines the library: the source, the compiler, and what `native` means to it here.

    A cache may be shared by machines with different CPUs. The compiler's macros name the instructions of this one.
    """
    options = _options(dtype)
    version, macros = _run(*compiler, "--version"), _run(*compiler, *options, "-E", "-dM", "-x", "c", os.devnull)
    inputs = (SOURCE.read_bytes(), repr((compiler, options)).encode(), version, macros)
    return _digest(b"\0".join(inputs))


def _compiled(dtype: torch.dtype) -> Path:
    """Return the library from the cache, after compiling it if it is not there, or not as it was written."""
    compiler = _compiler()
    assert compiler is not None
    folder = cache_dir() / "kernels" / f"native-{_key(compiler, dtype)}"
    if folder.exists() and not _is_intact(folder):
        damaged = folder.with_name(f".{folder.name}.{os.getpid()}")
        with suppress(FileNotFoundError):  # another process was first
            folder.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    if not folder.exists():
        with atomic_folder(folder) as draft:
            compiled, linked = draft / "native.o", draft / _LIBRARY
            _run(*compiler, *_options(dtype), "-o", str(compiled), str(SOURCE))
            _run(*compiler, "-shared", "-o", str(linked), str(compiled), "-lm")
            compiled.unlink()
            (draft / _DIGEST).write_text(_digest(linked.read_bytes()))
    return folder / _LIBRARY


def _run(*command: str) -> bytes:
    """Return what a command of the compiler writes to its output."""
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=_PATIENCE).stdout
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").splitlines()
        said = next((line for line in lines if "error" in line), (lines or ["no message"])[-1])
        sentence = f"{command[0]} failed ({said.strip()}); install a newer compiler, or set CC to another one"
    except subprocess.TimeoutExpired as error:
        sentence = f"{command[0]} took longer than {error.timeout:g} s; run the command again when the machine is idle"
    except OSError as error:  # a program for another machine, for example
        sentence = f"{command[0]} cannot be run ({error.strerror}); install a C compiler, such as gcc, or set CC"
    raise ConfigError(sentence)


def _is_intact(folder: Path) -> bool:
    """Return whether the library is the one that was compiled. Calling a truncated one would end the process."""
    try:
        return (folder / _DIGEST).read_bytes() == _digest((folder / _LIBRARY).read_bytes()).encode()
    except FileNotFoundError:
        return False


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()
