"""The kernels in C for CPUs."""

import ctypes
import math
import os
import re
import shutil
import stat
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dapo.kernels import native, rotary
from dapo.kernels.norm import add_rms_norm
from dapo.kernels.rounding import round_dithered
from dapo.kernels.sampler import draw
from dapo.kernels.swiglu import swiglu
from dapo.model.products import linear, wide_product
from dapo.types import SamplingParams
from tests.kernels.ways import native_types, needs_native, needs_native_for

THREADS = torch.get_num_threads()


NARROW, WIDE = torch.bfloat16, torch.float32


def values(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = NARROW) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def script(folder: Path, content: str) -> Path:
    """Write a program that stands in for the C compiler."""
    compiler = folder / "cc"
    compiler.write_text(content)
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    return compiler


def rounded_once(actual: Tensor, expected: Tensor) -> None:
    """Check that the error is one rounding to bfloat16, or that of a float32 sum."""
    error = 2**-8 * 1.001 if actual.dtype == NARROW else 1e-6
    assert (actual.double() - expected).abs().le(expected.abs() * error + 1e-6).all()


@pytest.fixture(scope="module")
def emulated_tiles(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels as on a CPU with AMX, whose instructions plain C stands in for."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("DAPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        changed.setenv("DAPO_AMX", "1")
        changed.setattr(native, "_COMPILE", (*native._COMPILE, "-include", str(Path(__file__).with_name("tiles.h"))))
        found = native._loaded.__wrapped__(NARROW)
    assert isinstance(found, ctypes.CDLL), found
    return found


@pytest.fixture(params=["float32", "bfloat16", "AMX"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """The type of the factors of a product, with the instructions of this CPU, and with AMX."""
    found = WIDE if request.param == "float32" else NARROW
    if (lack := native.missing(found)) is not None:
        pytest.skip(f"no kernels in C: {lack}")
    if request.param == "AMX":
        tiles = request.getfixturevalue("emulated_tiles")
        monkeypatch.setattr(native, "library", lambda dtype: tiles)
    return found


@pytest.fixture
def one_thread():
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(THREADS)


@pytest.mark.parametrize("rows", [1, 15, 16, 31, 48, 63, 64, 65, 200])
@pytest.mark.parametrize(("outputs", "terms"), [(1, 2), (15, 30), (16, 32), (33, 66), (130, 48), (32, 32), (75, 96)])
def test_a_product_is_rounded_once_or_stays_float32(rows: int, outputs: int, terms: int, dtype: torch.dtype) -> None:
    inputs, weight = values(rows, terms, dtype=dtype), values(outputs, terms, seed=1, dtype=dtype)
    bias = values(outputs, seed=2, dtype=dtype)
    exact = inputs.double() @ weight.double().t()
    wide = native.product(inputs, weight, is_wide=True)
    torch.testing.assert_close(wide.double(), exact, atol=1e-4, rtol=1e-5)
    rounded_once(native.product(inputs, weight), wide.double())
    with_bias = native.product(inputs, weight, bias, is_wide=True)
    torch.testing.assert_close(with_bias.double(), exact + bias.double(), atol=1e-4, rtol=1e-5)
    assert torch.equal(native.product(inputs, weight, bias), with_bias.to(dtype))


def test_a_product_reads_the_rows_of_any_layout(dtype: torch.dtype) -> None:
    weight, wide = values(33, 48, seed=1, dtype=dtype), torch.full((20, 99), math.nan, dtype=dtype)
    inputs = values(20, 48, dtype=dtype)
    wide[:, 11:59] = inputs
    expected = native.product(inputs, weight)
    assert torch.equal(native.product(wide[:, 11:59], weight), expected)
    assert torch.equal(native.product(inputs.t().contiguous().t(), weight), expected)


def test_a_row_has_the_same_bits_alone_and_in_any_batch_with_any_number_of_threads(
    one_thread: None, dtype: torch.dtype
) -> None:
    inputs, weight = values(150, 96, dtype=dtype), values(70, 96, seed=1, dtype=dtype)
    together = native.product(inputs, weight, is_wide=True)
    for rows in (slice(0, 1), slice(3, 20), slice(40, 105), slice(149, 150)):
        assert torch.equal(native.product(inputs[rows], weight, is_wide=True), together[rows])
    torch.set_num_threads(2)
    assert torch.equal(native.product(inputs, weight, is_wide=True), together)


@pytest.mark.parametrize("tokens", [1, 2, 77, 300])
@pytest.mark.parametrize(("left_width", "right_width"), [(70, 35), (1, 1), (300, 17), (17, 270)])
def test_a_product_over_tokens_is_added_to_a_total(
    tokens: int, left_width: int, right_width: int, dtype: torch.dtype
) -> None:
    left, right = values(tokens, left_width, dtype=dtype), values(tokens, right_width, seed=1, dtype=dtype)
    total = torch.full((left_width, right_width), 5.0)
    native.add_product(total, left, right)
    torch.testing.assert_close(total.double(), 5 + left.double().t() @ right.double(), atol=2e-4, rtol=1e-5)


@needs_native_for(WIDE)
@pytest.mark.parametrize("rows", [1, 15, 17, 300])
@pytest.mark.parametrize(("outputs", "terms"), [(1, 1), (63, 40), (65, 256), (270, 257), (30, 600)])
def test_a_plain_product_takes_factors_of_any_layout(rows: int, outputs: int, terms: int) -> None:
    left, right = values(rows, terms, dtype=WIDE), values(terms, outputs, seed=1, dtype=WIDE)
    exact = left.double() @ right.double()
    apart = torch.full((rows, 2 * terms), math.nan)
    apart[:, ::2] = left
    for given in (left, left.t().contiguous().t(), apart[:, ::2]):
        found = native.plain_product(given, right)
        torch.testing.assert_close(found.double(), exact, atol=2e-4, rtol=1e-5)
        assert torch.equal(found, native.plain_product(left, right.t().contiguous().t())), "the layout changes no bit"


@native_types
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 24), (70, 576), (3, 2500)])
@pytest.mark.parametrize("has_delta", [True, False])
def test_the_norm_adds_in_float32_and_rounds_once(rows: int, width: int, has_delta: bool, dtype: torch.dtype) -> None:
    residual, delta = values(rows, width).float() * 1.001, values(rows, width, seed=1, dtype=dtype)
    weight = values(width, seed=2, dtype=dtype)
    given = delta if has_delta else None
    normed, total, rstd = add_rms_norm(residual, given, weight, 1e-3)
    exact = residual.double() + (delta.double() if has_delta else 0)
    scale = (exact.square().mean(-1) + 1e-3).rsqrt()
    torch.testing.assert_close(total.double(), exact, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(rstd.double(), scale, atol=1e-6, rtol=1e-6)
    rounded_once(normed, exact * scale[:, None] * weight.double())
    assert (total is residual) == (not has_delta)


@native_types
def test_swiglu_rounds_once_and_survives_huge_gates(dtype: torch.dtype) -> None:
    gate_up = values(9, 2 * 700, scale=4, dtype=dtype)
    gate_up[0, 0], gate_up[0, 1] = -1e4, 1e4
    gate, up = gate_up.double().chunk(2, -1)
    rounded_once(swiglu(gate_up), gate * torch.sigmoid(gate) * up)
    assert torch.equal(swiglu(gate_up[3:4]), swiglu(gate_up)[3:4])


@native_types
@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize("is_rotated", [True, False])
@pytest.mark.parametrize("size", [6, 48, 64])
def test_rotation_agrees_with_pytorch(is_normed: bool, is_rotated: bool, size: int, dtype: torch.dtype) -> None:
    heads, kv_heads, rows = 3, 2, 50
    qkv, positions = values(rows, (heads + 2 * kv_heads) * size, dtype=dtype), torch.arange(rows) % 9
    angles = torch.randn(9, size // 2)
    table = torch.cat([angles.cos(), angles.sin()], -1) if is_rotated else None
    weights = values(size, seed=1, dtype=dtype), values(size, seed=2, dtype=dtype)
    norms = rotary.HeadNorms(*weights, 1e-3) if is_normed else None
    ours, theirs = qkv.clone(), qkv.clone()
    found = rotary.rotate(ours, positions, table, heads, kv_heads, norms)
    expected = rotary.rotate.torch(theirs, positions, table, heads, kv_heads, norms)
    # Fused or not, a sum of two products may round to the other neighbor, after norms from another neighbor.
    if dtype == WIDE:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    else:
        torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2**-6)
        assert (found != expected).float().mean() < 0.01
    assert torch.equal(ours[:, (heads + kv_heads) * size :], qkv[:, (heads + kv_heads) * size :])
    assert (found.data_ptr() == ours.data_ptr()) == (not is_normed)


@needs_native
def test_dithered_rounding_has_the_bits_of_pytorch() -> None:
    wide, base = values(33, 70).float() * 1e-3, values(33, 70, seed=1)
    wide[0, :4] = torch.tensor([0.0, -0.0, math.nan, math.inf])
    base[0, :2] = torch.tensor([-0.0, math.inf])
    for given in (None, base):
        ours, theirs = torch.empty_like(base), torch.empty_like(base)
        round_dithered(wide, ours, given)
        round_dithered.torch(wide, theirs, given)
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def spans(starts: list[int], counts: list[int], stride: int) -> native.Spans:
    return native.Spans(torch.tensor(starts) * stride, torch.tensor(counts))


@native_types
@pytest.mark.parametrize("size", native.HEAD_SIZES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (7, 1)])
def test_attention_matches_a_softmax_in_float64(size: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    counts = [1, 2, 15, 16, 17, 40]
    query, keys, values_ = (
        values(len(counts), heads, size, dtype=dtype),
        values(40, kv_heads, size, seed=1, dtype=dtype),
        values(40, kv_heads, size, seed=2, dtype=dtype),
    )
    stride = kv_heads * size
    first, second = (
        spans([0] * 6, [c // 2 for c in counts], stride),
        spans([c // 2 for c in counts], [c - c // 2 for c in counts], stride),
    )
    sources = tuple(each.of(keys, values_, stride, size) for each in (first, second))
    found = native.attention(query, sources, kv_heads, 40, 0.3)
    for token, count in enumerate(counts):
        for head in range(heads):
            k, v = (each[:count, head * kv_heads // heads].double() for each in (keys, values_))
            weights = (0.3 * k @ query[token, head].double()).softmax(0)
            error = found[token, head].double() - weights @ v
            largest = (weights @ v).abs().max()
            assert error.abs().max() < (2**-8 if dtype == NARROW else 1e-5) * largest + 1e-5


@native_types
def test_how_tokens_divide_into_sources_and_where_they_lie_changes_no_bit(dtype: torch.dtype) -> None:
    kv_heads, size, tokens = 2, 32, 41
    query, keys, values_ = (
        values(1, 4, size, dtype=dtype),
        values(tokens, kv_heads, size, seed=1, dtype=dtype),
        values(tokens, kv_heads, size, seed=2, dtype=dtype),
    )
    stride = kv_heads * size
    found = []
    for cut in (0, 1, 16, 30, tokens):
        sources = tuple(
            spans([start], [count], stride).of(keys, values_, stride, size)
            for start, count in ((0, cut), (cut, tokens - cut))
        )
        found.append(native.attention(query, sources, kv_heads, tokens, 0.2))
    cache_keys, cache_values = torch.full((2, kv_heads, 50, size), math.nan, dtype=dtype).unbind(0)
    native.store(keys, values_, cache_keys, cache_values, torch.arange(tokens) * size, 50 * size)
    cached = spans([0], [tokens], 1).of(cache_keys, cache_values, size, 50 * size)
    none = spans([0], [0], 1).of(cache_keys, cache_values, size, 50 * size)
    found.append(native.attention(query, (none, cached), kv_heads, tokens, 0.2))
    assert all(torch.equal(each, found[0]) for each in found)


@needs_native_for(WIDE)
@pytest.mark.parametrize("vocabulary", [3, 256, 700, 49152])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_token_and_its_log_probability_are_those_of_the_sampler(vocabulary: int, temperature: float) -> None:
    logits = 20 + 4 * torch.randn(60, vocabulary, generator=torch.Generator().manual_seed(3))
    uniforms = torch.rand(60, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    tokens, logprobs = native.draw(logits, uniforms, temperature)
    expected, _ = draw(logits, uniforms, SamplingParams(temperature, max_tokens=1))
    assert (tokens != expected).sum() <= 1, "a token may be its neighbor where the number hits the border of both"
    exact = (logits.double() / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, atol=3e-6, rtol=0)


@needs_native_for(WIDE)
def test_drawing_keeps_impossible_tokens_out_and_survives_extreme_numbers() -> None:
    logits = torch.full((4, 300), -math.inf)
    logits[:, 7], logits[:, 290] = 1.0, 1.0
    edges = torch.tensor([2.0**-53, 0.5 - 2**-30, 0.5 + 2**-30, 1 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs = native.draw(logits, edges, 1.0)
    assert tokens.tolist() == [7, 7, 290, 290]
    torch.testing.assert_close(logprobs, torch.full((4,), -math.log(2)))
    tokens, logprobs = native.draw(torch.full((1, 300), math.nan), edges[:1], 1.0)
    assert tokens.tolist() == [0] and logprobs.isnan().all()
    for place in (0, 5, 16, 299):
        one = torch.zeros(2, 300)
        one[0, place] = math.nan
        tokens, logprobs = native.draw(one, edges[:2], 1.0)
        assert tokens[0] == 0 and logprobs.isnan().tolist() == [True, False]


@needs_native_for(WIDE)
def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([0.1, 2.0, -1.0, 0.7, -math.inf]).repeat(1, 60)[:, :299]  # more than one block
    uniforms = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    tokens, _ = native.draw(logits.expand(20_000, -1), uniforms, 1.3)
    shares = torch.bincount(tokens, minlength=299).double() / 20_000
    torch.testing.assert_close(shares, (logits[0].double() / 1.3).softmax(0), atol=1.1e-4, rtol=0)


def test_without_a_compiler_or_the_instructions_pytorch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", native._loaded.__wrapped__)
    monkeypatch.setattr(native, "cpu_flags", lambda: native.INSTRUCTIONS[NARROW])
    for compiler in ("no-such-compiler", "'gcc"):
        monkeypatch.setenv("CC", compiler)
        for dtype in (NARROW, WIDE):
            assert native.library(dtype) is None and native.missing(dtype) == native.obstacle(dtype)
            assert f"the C compiler {compiler} was not found; install one" in (native.missing(dtype) or "")
            assert not native.is_native(values(2, 2, dtype=dtype))
    monkeypatch.setattr(native, "cpu_flags", lambda: native.INSTRUCTIONS[WIDE])
    assert native.obstacle(NARROW) == "this CPU has no AVX-512 bf16"
    monkeypatch.setattr(native, "cpu_flags", lambda: {"sse2"})
    assert native.obstacle(WIDE) == "this CPU has no AVX-512"


@needs_native
def test_a_compiler_that_fails_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = script(tmp_path, '#!/bin/sh\ncase "$*" in --version | *-dM*) exit 0;; esac\necho broken >&2; exit 1\n')
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "cache"))
    assert native._loaded.__wrapped__(NARROW) == (
        f"{compiler} failed (broken); install a newer compiler, or set CC to another one"
    )
    assert not list((tmp_path / "cache" / "kernels").iterdir()), "nothing half-written stays"


@needs_native
def test_a_call_of_a_kernel_that_cannot_be_compiled_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(script(tmp_path, "#!/bin/sh\nexec sleep 60\n")))
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_PATIENCE", 0.1)
    monkeypatch.setattr(native, "_loaded", native._loaded.__wrapped__)
    with pytest.raises(AssertionError, match=r"cc took longer than 0.1 s; run the command again"):
        native.swiglu(values(2, 4))


@needs_native
def test_the_reason_names_the_cache_if_nothing_can_be_written_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(native, "_loaded", native._loaded.__wrapped__)
    assert native.library(NARROW) is None
    assert str(tmp_path / "file") in (native.obstacle(NARROW) or "")
    assert (native.obstacle(NARROW) or "").endswith("set DAPO_CACHE to a folder that can be written")


@needs_native
@pytest.mark.parametrize("content", ["\x7fELF", "#!/no/such/interpreter\n"])
def test_the_reason_is_the_compiler_if_it_cannot_be_run(
    content: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", str(script(tmp_path, content)))
    assert re.fullmatch(
        r"\S+/cc cannot be run \([A-Z][\w ]+\); install a C compiler, such as gcc, or set CC",
        native._loaded.__wrapped__(NARROW),
    )


@needs_native
def test_the_reason_is_the_compiler_if_what_it_made_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "another.h").write_text("void from_another_openmp(void);\nvoid call(void) { from_another_openmp(); }\n")
    monkeypatch.setenv("CC", f"{os.environ.get('CC') or 'cc'} -include {tmp_path / 'another.h'}")
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "cache"))
    reason = str(native._loaded.__wrapped__(NARROW))
    assert reason.startswith("the compiled kernels cannot be loaded (")
    assert "undefined symbol: from_another_openmp); set CC=gcc, or DAPO_CACHE to" in reason


@needs_native
@pytest.mark.usefixtures("no_home")
def test_a_user_without_a_home_folder_is_told_to_name_the_cache() -> None:
    assert "home folder is not known; set DAPO_CACHE" in str(native._loaded(NARROW))


@needs_native
def test_the_command_of_the_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", f"env DAPO_TEST=1 {os.environ.get('CC') or 'cc'} -g0")
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path))
    assert isinstance(native._loaded.__wrapped__(NARROW), ctypes.CDLL)


@needs_native
def test_attention_refuses_what_it_would_read_wrongly() -> None:
    narrow = values(5, 1, 32)
    with pytest.raises(AssertionError, match="same shape"):
        spans([0], [5], 32).of(narrow, values(5, 1, 16), 32, 32)
    with pytest.raises(AssertionError, match="same type"):
        spans([0], [5], 32).of(narrow, narrow.float(), 32, 32)
    sources = (spans([0], [5], 32).of(narrow, narrow, 32, 32),) * 2
    with pytest.raises(AssertionError, match="the type of the keys"):
        native.attention(values(1, 1, 32).float(), sources, 1, 5, 1.0)
    with pytest.raises(AssertionError, match="head size of 72"):
        native.attention(values(1, 1, 72), sources, 1, 5, 1.0)


@needs_native
def test_a_library_is_for_the_cpu_that_the_compiler_finds_and_for_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = script(
        tmp_path,
        f'#!/bin/sh\n[ "$1" = --version ] && echo "$VERSION"\nexec {os.environ.get("CC") or "cc"} "$@" $MACHINE\n',
    )
    keys = []
    for version, machine in (("1", ""), ("1", ""), ("2", ""), ("1", "-mno-avx512vbmi")):
        monkeypatch.setenv("VERSION", version)
        monkeypatch.setenv("MACHINE", machine)
        keys.append(native._key((str(compiler),), NARROW))
    assert keys[0] == keys[1] and len(set(keys)) == 3


@needs_native
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"input_Ti": values(5, 48).float()}, "both factors must be in float32 or in bfloat16"),
        ({"weight_oi": values(30, 48).float()}, "both factors must be in float32 or in bfloat16"),
        ({"input_Ti": values(5, 48).double(), "weight_oi": values(30, 48).double()}, "in float32 or in bfloat16"),
        ({"weight_oi": values(30, 32)}, "the same number of terms"),
        ({"input_Ti": values(5, 47), "weight_oi": values(30, 47)}, "terms must be even"),
        ({"weight_oi": values(48, 30).t()}, "must be contiguous"),
        ({"bias_o": values(30).float()}, "bias must have the type of the factors"),
        ({"bias_o": values(29)}, "bias must have a term per row"),
        ({"bias_o": values(60)[::2]}, "bias must be contiguous"),
    ],
)
def test_a_product_refuses_what_it_would_read_wrongly(changes: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        native.product(**{"input_Ti": values(5, 48), "weight_oi": values(30, 48), "bias_o": values(30)} | changes)


@needs_native
@pytest.mark.parametrize(
    ("total", "tokens", "reason"),
    [
        (torch.zeros(30, 40, dtype=torch.float64), 9, "total must be in float32"),
        (torch.zeros(30, 39), 9, "result must have"),
        (torch.zeros(40, 30).t(), 9, "must be contiguous"),
        (torch.zeros(30, 40), 41, "the same number of terms"),
    ],
)
@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_a_sum_of_products_refuses_what_it_would_write_wrongly(
    total: Tensor, tokens: int, reason: str, dtype: torch.dtype
) -> None:
    with pytest.raises(AssertionError, match=reason):
        native.add_product(total, values(9, 30, dtype=dtype), values(tokens, 40, dtype=dtype))


@needs_native
def test_the_library_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path))
    assert isinstance(native._loaded.__wrapped__(NARROW), ctypes.CDLL)
    (made,) = (tmp_path / "kernels").glob("*/*.so")
    before = os.stat(made).st_mtime_ns
    assert isinstance(native._loaded.__wrapped__(NARROW), ctypes.CDLL)
    assert os.stat(made).st_mtime_ns == before


@needs_native
def test_the_sizes_that_the_source_shares_are_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logits, uniforms = values(3, 300).float(), torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    expected, drawn = native.product(values(70, 48), values(30, 48, seed=1)), native.draw(logits, uniforms, 1.0)
    for name, size in {"_ROWS": 32, "_TERMS": 16, "_MASSES": 64, "HEAD_SIZES": (160,)}.items():
        monkeypatch.setattr(native, name, size)
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path))
    other = native._loaded.__wrapped__(NARROW)
    monkeypatch.setattr(native, "library", lambda dtype: other)
    assert torch.equal(native.product(values(70, 48), values(30, 48, seed=1)), expected)
    assert torch.equal(native.draw(logits, uniforms, 1.0)[0], drawn[0])
    only = values(1, 1, 160)
    source = spans([0], [1], 160).of(only, only, 160, 160)
    none = spans([0], [0], 160).of(only, only, 160, 160)
    assert torch.equal(native.attention(only, (source, none), 1, 1, 1.0), only)


@needs_native
@pytest.mark.parametrize("damage", ["empty", "truncated", "another", "alone"])
def test_a_library_that_is_damaged_is_compiled_again(
    damage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path))
    made = native._compiled(NARROW)  # not loaded, because damage to a loaded library ends the process
    whole = made.read_bytes()
    if damage == "alone":
        for other in made.parent.iterdir():
            if other != made:
                other.unlink()
    else:
        changed = {"empty": b"", "truncated": whole[: len(whole) // 2], "another": whole[:-1] + bytes([whole[-1] ^ 1])}
        made.write_bytes(changed[damage])
    assert native._compiled(NARROW).read_bytes() == whole
    assert {path.name for path in made.parent.iterdir()} == {native._LIBRARY, native._DIGEST}


@needs_native
def test_what_a_killed_compiler_left_is_removed_after_a_day(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path))
    folder = native._compiled(NARROW).parent
    shutil.rmtree(folder)
    for name, hours in (("old", 25), ("young", 23)):
        leftover = folder.with_name(f".{folder.name}.{name}")
        leftover.mkdir()
        os.utime(leftover, (0, time.time() - hours * 3600))
    assert native._compiled(NARROW).parent == folder
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f".{folder.name}.young"}


@needs_native
def test_tiles_compute_the_products_that_consist_of_whole_tiles(emulated_tiles: ctypes.CDLL) -> None:
    count = ctypes.c_int.in_dll(emulated_tiles, "products_of_tiles")
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(native, "library", lambda dtype: emulated_tiles)
        for rows, outputs, terms, expected in [
            (1, 32, 64, 4),
            (33, 96, 32, 18),
            (65, 40, 32, 20),
            (9, 31, 64, 0),
            (9, 32, 48, 0),
        ]:
            before = count.value
            native.product(values(rows, terms), values(outputs, terms, seed=1))
            assert count.value - before == expected


@native_types
def test_products_use_the_kernels(dtype: torch.dtype) -> None:
    inputs, weight = values(20, 48, dtype=dtype), values(30, 48, seed=1, dtype=dtype)
    assert torch.equal(linear(inputs, weight), native.product(inputs, weight))
    assert torch.equal(wide_product(inputs, weight.t()), native.product(inputs, weight, is_wide=True))


@needs_native
def test_products_of_an_odd_number_of_bfloat16_terms_are_left_to_pytorch() -> None:
    inputs, weight = values(20, 47), values(30, 47, seed=1)
    torch.testing.assert_close(linear(inputs, weight), F.linear(inputs, weight))
