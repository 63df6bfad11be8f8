import inspect
from types import ModuleType

import pytest
import torch
from torch import Tensor

from dapo.kernels import decode_attention, draw, head, native, norm, piece_attention, rotary, rounding, share, swiglu
from dapo.kernels.dispatch import Kernel
from tests.kernels.ways import DEVICE, all_ways, both, needs_triton

HEADS, KV_HEADS = 3, 2


def values(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def strided(tensor: Tensor) -> Tensor:
    """Return the rows as a view of wider ones, so that code that assumes contiguous rows reads NaN."""
    wide = tensor.new_full((len(tensor), tensor.shape[1] + 11), float("nan"))
    wide[:, 3:-8] = tensor
    return wide[:, 3:-8]


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def rounded_once(how: str, actual: Tensor, expected: Tensor) -> None:
    """Check that the error is one rounding to bfloat16: 2^-8 of the value, or 2^-7 where the interpreter truncates."""
    assert actual.dtype == torch.bfloat16
    unit = 2**-7 if how == "triton" and DEVICE == "cpu" else 2**-8
    assert (actual.double() - expected).abs().le(expected.abs() * unit * 1.001 + 1e-6).all()


def reference_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@all_ways
@pytest.mark.parametrize(("rows", "width", "has_delta"), [(5, 24, True), (333, 24, False), (3, 2500, True)])
def test_norm_is_applied_to_the_sum(how: str, rows: int, width: int, has_delta: bool) -> None:
    residual, weight = values(rows, width, seed=0), values(width, seed=1)
    delta = values(rows, width, seed=2) if has_delta else None
    normed, total, rstd = getattr(norm.add_rms_norm, how)(residual, delta, weight, 1e-3)
    expected = residual.double() + (0 if delta is None else delta.double())
    close(total, expected)
    close(rstd, (expected.square().mean(-1) + 1e-3).rsqrt())
    close(normed, reference_norm(expected, weight.double(), 1e-3))
    assert (total is residual) == (delta is None)


@both
def test_norm_rounds_once_to_the_dtype_of_the_delta_or_of_the_weight(how: str) -> None:
    forward = getattr(norm.add_rms_norm, how)
    residual, delta = values(9, 40, seed=0), values(9, 40, seed=1, dtype=torch.bfloat16)
    weight = values(40, seed=2, dtype=torch.bfloat16)
    normed, total, rstd = forward(residual, delta, weight.float(), 1e-5)
    rounded_once(how, normed, reference_norm(residual.double() + delta.double(), weight.double(), 1e-5))
    assert total.dtype == rstd.dtype == torch.float32
    assert forward(residual, None, weight, 1e-5)[0].dtype == torch.bfloat16


@both
@pytest.mark.parametrize(("rows", "width"), [(5, 24), (333, 24), (5, 2500)])
def test_norm_gradients_match_autograd(how: str, rows: int, width: int) -> None:
    x, weight = values(rows, width, seed=0), values(width, seed=1)
    grad_normed, grad_sum = values(rows, width, seed=2), values(rows, width, seed=3)
    _, _, rstd = norm.add_rms_norm.torch(x, None, weight, 1e-3)
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    loss = (reference_norm(x64, weight64, 1e-3) * grad_normed.double()).sum()
    grad_x, grad_weight = torch.autograd.grad(loss, (x64, weight64))

    backward = getattr(norm.add_rms_norm_backward, how)
    weight_grad = torch.full_like(weight, 7.0)
    grad, narrow = backward(grad_normed, grad_sum, x, rstd, weight, weight_grad)
    close(grad, grad_x + grad_sum.double())
    close(narrow, grad)
    close(weight_grad, grad_weight + 7)
    assert grad.data_ptr() != narrow.data_ptr()
    close(backward(grad_normed, None, x, rstd, weight, None)[0], grad_x)


@both
def test_norm_backward_returns_both_precisions(how: str) -> None:
    x, weight = values(70, 40, seed=0), values(40, seed=1, dtype=torch.bfloat16)
    grad_normed = values(70, 40, seed=2, dtype=torch.bfloat16)
    _, _, rstd = norm.add_rms_norm.torch(x, None, weight, 1e-5)
    weight_grad = torch.zeros(40, device=DEVICE)
    grad, narrow = getattr(norm.add_rms_norm_backward, how)(grad_normed, x, x, rstd, weight, weight_grad)
    assert grad.dtype == torch.float32
    rounded_once(how, narrow, grad.double())
    close(weight_grad, (grad_normed.double() * x.double() * rstd.double()[:, None]).sum(0))


@both
def test_dithered_rounding_keeps_the_mean_of_changes_that_rounding_to_the_nearest_would_drop(how: str) -> None:
    base = values(300, 500, seed=0, dtype=torch.bfloat16)
    delta = 1e-5 * values(300, 1, seed=1).expand(300, 500).contiguous()
    assert ((base.float() + delta).bfloat16() - base).double().mean(1).norm() < 0.2 * delta.double().mean(1).norm()
    out = torch.empty_like(base)
    getattr(rounding.round_dithered, how)(delta, out, base)
    change, wanted = (out.double() - base.double()).mean(1), delta.double().mean(1)
    assert abs(float(change @ wanted / (wanted @ wanted)) - 1) < 0.2
    assert (out != base).float().mean() < 0.05, "each change is a whole step between neighbors, and rare"


@both
def test_dithered_rounding_goes_to_a_neighbor_and_keeps_what_needs_no_rounding(how: str) -> None:
    rounded = getattr(rounding.round_dithered, how)
    base, delta = values(33, 70, seed=0, dtype=torch.bfloat16), values(33, 70, seed=1)
    base[0, :3] = torch.tensor([0.0, -0.0, float("inf")])
    delta[0] = 0
    out = torch.empty_like(base)
    rounded(delta, out, base)
    assert torch.equal(out[0].view(torch.int16), base[0].view(torch.int16))
    exact, found = (base.float() + delta)[1:], out[1:].float()
    assert ((found - exact).abs() <= torch.minimum(found.abs(), exact.abs()) * 2**-7).all()
    nearest = exact.bfloat16().float()
    assert 0.2 < (found != nearest).float().mean() < 0.3, "a quarter goes to the neighbor farther away"
    delta[3] = float("nan")
    rounded(delta, out, base)
    assert out[3].isnan().all() and not out[4:].isnan().any()


@needs_triton
def test_dithered_rounding_has_the_same_bits_in_both_implementations() -> None:
    base, delta = values(33, 70, seed=0, dtype=torch.bfloat16), 1e-3 * values(33, 70, seed=1)
    one, two = torch.empty_like(base), torch.empty_like(base)
    for given in (base, None):
        rounding.round_dithered.torch(delta, one, given)
        rounding.round_dithered.triton(delta, two, given)
        assert torch.equal(one, two)
    exact = base.float().contiguous()
    rounding.round_dithered.torch(exact, one)
    assert torch.equal(one, base)


@all_ways
@pytest.mark.parametrize(("rows", "width"), [(5, 24), (9, 700)])
def test_swiglu_and_its_gradient_match_autograd(how: str, rows: int, width: int) -> None:
    gate_up, grad = 4 * values(rows, 2 * width, seed=0), values(rows, width, seed=1)
    gate_up64 = gate_up.double().requires_grad_()
    gate, up = gate_up64[:, :width], gate_up64[:, width:]
    expected = gate * torch.sigmoid(gate) * up
    (expected_grad,) = torch.autograd.grad((expected * grad.double()).sum(), gate_up64)

    close(getattr(swiglu.swiglu, how)(gate_up), expected)
    act, grad_gate_up = getattr(swiglu.swiglu_backward, how)(gate_up, grad)
    close(act, expected)
    close(grad_gate_up, expected_grad)


@all_ways
def test_swiglu_rounds_once_and_survives_huge_gates(how: str) -> None:
    if how == "native" and native.missing(torch.bfloat16):
        pytest.skip("no kernels in C for bfloat16")
    gate_up, grad = values(5, 48, seed=0, dtype=torch.bfloat16), values(5, 24, seed=1, dtype=torch.bfloat16)
    gate_up[0, 0], gate_up[0, 1] = -1e4, 1e4
    gate, up = gate_up.double().chunk(2, -1)
    act, grad_gate_up = getattr(swiglu.swiglu_backward, how)(gate_up, grad)
    rounded_once(how, act, gate * torch.sigmoid(gate) * up)
    rounded_once(how, getattr(swiglu.swiglu, how)(gate_up), gate * torch.sigmoid(gate) * up)
    rounded_once(how, grad_gate_up[:, 24:], gate * torch.sigmoid(gate) * grad.double())
    assert grad_gate_up.isfinite().all()


def head_norms(size: int, dtype: torch.dtype = torch.float32) -> rotary.HeadNorms:
    return rotary.HeadNorms(values(size, seed=11, dtype=dtype), values(size, seed=12, dtype=dtype), 1e-3)


def angles_table(positions: int, size: int) -> tuple[Tensor, Tensor]:
    angles = values(positions, size // 2, seed=13)
    return torch.cat([angles.cos(), angles.sin()], -1), angles


def reference_rotation(
    qk: Tensor, positions: Tensor, angles: Tensor | None, weights: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Rotate each head as complex numbers, its halves being real and imaginary parts, multiplied by e^(i angle)."""
    x = qk.unflatten(1, (HEADS + KV_HEADS, -1))
    if weights is not None:
        query = reference_norm(x[:, :HEADS], weights[0], 1e-3)
        x = torch.cat([query, reference_norm(x[:, HEADS:], weights[1], 1e-3)], 1)
    if angles is not None:
        half = x.shape[-1] // 2
        rotation = torch.polar(torch.ones_like(angles.double()), angles.double())[positions, None]
        rotated = torch.complex(x[..., :half], x[..., half:]) * rotation
        x = torch.cat([rotated.real, rotated.imag], -1)
    return x.flatten(1)


@both
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(5, 6), (150, 16)])
def test_rotation_and_its_gradients_match_autograd(
    how: str, is_normed: bool, is_rotated: bool, rows: int, size: int
) -> None:
    columns = (HEADS + KV_HEADS) * size
    qkv, grad_qk = values(rows, columns + KV_HEADS * size, seed=0), values(rows, columns, seed=1)
    positions = torch.randint(9, (rows,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    table, angles = angles_table(9, size) if is_rotated else (None, None)
    norms = head_norms(size) if is_normed else None
    qk64 = qkv[:, :columns].double().requires_grad_()
    weights = (norms.query_D.double().requires_grad_(), norms.key_D.double().requires_grad_()) if norms else None
    expected = reference_rotation(qk64, positions, angles, weights)
    grads = torch.autograd.grad((expected * grad_qk.double()).sum(), (qk64, *(weights or ())))

    given = strided(qkv)
    qk = getattr(rotary.rotate, how)(given, positions, table, HEADS, KV_HEADS, norms)
    close(qk, expected)
    close(given[:, columns:], qkv[:, columns:])
    if norms is None:
        assert qk.data_ptr() == given.data_ptr()
    else:
        close(given, qkv)

    grad_qkv = strided(torch.full_like(qkv, 5.0))
    norm_grads = (torch.full((size,), 3.0, device=DEVICE), torch.full((size,), 4.0, device=DEVICE)) if norms else None
    backward = getattr(rotary.rotate_backward, how)
    backward(strided(grad_qk), given, positions, table, HEADS, KV_HEADS, norms, norm_grads, grad_qkv)
    close(grad_qkv[:, :columns], grads[0])
    assert (grad_qkv[:, columns:] == 5).all()
    if norm_grads is not None:
        close(norm_grads[0], grads[1] + 3)
        close(norm_grads[1], grads[2] + 4)


@both
def test_rotation_without_norms_is_undone_in_place_by_its_backward(how: str) -> None:
    qkv = values(7, 7 * 8, seed=0)
    table, _ = angles_table(9, 8)
    positions = torch.arange(7, device=DEVICE)
    rotated = qkv.clone()
    qk = getattr(rotary.rotate, how)(rotated, positions, table, HEADS, KV_HEADS, None)
    assert not torch.allclose(rotated, qkv)
    getattr(rotary.rotate_backward, how)(qk, rotated, positions, table, HEADS, KV_HEADS, None, None, rotated)
    close(rotated, qkv)


@both
def test_rotation_rounds_once_and_norms_round_before_it(how: str) -> None:
    qkv = values(5, 7 * 8, seed=0, dtype=torch.bfloat16)
    table, angles = angles_table(9, 8)
    positions = torch.arange(5, device=DEVICE)
    plain = reference_rotation(qkv[:, :40].double(), positions, angles, None)
    norms = head_norms(8, torch.bfloat16)
    weights = norms.query_D.double(), norms.key_D.double()
    normed = reference_rotation(qkv[:, :40].double(), positions, None, weights)
    rotate = getattr(rotary.rotate, how)
    only_normed = rotate(qkv, positions, None, HEADS, KV_HEADS, norms)
    rounded_once(how, only_normed, normed)
    rotated = reference_rotation(only_normed.double(), positions, angles, None)
    rounded_once(how, rotate(qkv, positions, table, HEADS, KV_HEADS, norms), rotated)
    rounded_once(how, rotate(qkv, positions, table, HEADS, KV_HEADS, None), plain)


@both
def test_gradients_of_head_norm_weights_are_optional(how: str) -> None:
    qkv, grad_qk = values(5, 7 * 8, seed=0), values(5, 5 * 8, seed=1)
    args = (torch.arange(5, device=DEVICE), angles_table(9, 8)[0], HEADS, KV_HEADS, head_norms(8))
    with_grads, without = torch.empty_like(qkv), torch.empty_like(qkv)
    backward = getattr(rotary.rotate_backward, how)
    backward(grad_qk, qkv, *args, (torch.zeros(8, device=DEVICE), torch.zeros(8, device=DEVICE)), with_grads)
    backward(grad_qk, qkv, *args, None, without)
    assert torch.equal(with_grads[:, :40], without[:, :40])


def copies() -> tuple[Tensor, Tensor, Tensor]:
    """Return sources, starts and places of copies of 11 rows: none of row 4, twelve of row 0, up to three of others."""
    sources = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8, 9, 10, *[0] * 11, 10, 3, 3, 9], dtype=torch.int32)
    places = sources.argsort(stable=True).int()
    starts = torch.cat([torch.zeros(1), torch.bincount(sources, minlength=11).cumsum(0)]).int()
    return sources.to(DEVICE), starts.to(DEVICE), places.to(DEVICE)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 600])
def test_spread_copies_rows_exactly(how: str, dtype: torch.dtype, width: int) -> None:
    rows = values(11, width, seed=0, dtype=dtype)
    sources, _, _ = copies()
    spread = getattr(share.spread, how)(strided(rows), sources)
    assert spread.dtype == dtype and spread.is_contiguous()
    assert torch.equal(spread, rows[sources.long()])


@both
@pytest.mark.parametrize("width", [24, 600])
def test_gather_sum_is_the_gradient_of_spread(how: str, width: int) -> None:
    sources, starts, places = copies()
    rows = torch.zeros(11, width, dtype=torch.float64, device=DEVICE, requires_grad=True)
    grads = values(len(sources), width, seed=1)
    (expected,) = torch.autograd.grad((rows[sources.long()] * grads.double()).sum(), rows)
    close(getattr(share.gather_sum, how)(strided(grads), starts, places), expected)


@both
def test_gather_sum_rounds_once_and_leaves_rows_without_copies_zero(how: str) -> None:
    sources, starts, places = copies()
    grads = values(len(sources), 24, seed=1, dtype=torch.bfloat16)
    total = getattr(share.gather_sum, how)(grads, starts, places)
    expected = torch.zeros(11, 24, dtype=torch.float64, device=DEVICE).index_add_(0, sources.long(), grads.double())
    rounded_once(how, total, expected)
    assert (total[4] == 0).all()


@needs_triton
def test_sums_over_rows_give_the_same_bits_every_time() -> None:
    x, weight, rstd = values(200, 24, seed=0), values(24, seed=1), values(200, seed=2)
    sums = [torch.zeros(24, device=DEVICE) for _ in range(2)]
    for total in sums:
        norm.add_rms_norm_backward.triton(x, None, x, rstd, weight, total)
    assert sums[0].any() and torch.equal(*sums)


def test_a_kernel_uses_triton_on_a_gpu_and_pytorch_where_there_is_no_kernel_in_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "library", lambda dtype: None)
    residual, delta, weight = values(5, 24, seed=0), values(5, 24, seed=1), values(24, seed=2)
    how = "triton" if DEVICE == "cuda" else "torch"
    calls = [
        (norm.add_rms_norm, (residual, delta, weight, 1e-5)),
        (swiglu.swiglu, (residual,)),
        (swiglu.swiglu_backward, (residual, delta[:, :12].contiguous())),
        (share.spread, (residual, copies()[0] % 5)),
    ]
    for kernel, args in calls:
        torch.testing.assert_close(kernel(*args), getattr(kernel, how)(*args), rtol=0, atol=0)


@needs_triton
@pytest.mark.parametrize(
    "module", [decode_attention, draw, head, norm, piece_attention, rotary, rounding, share, swiglu]
)
def test_both_implementations_of_a_kernel_have_the_same_signature(module: ModuleType) -> None:
    kernels = [value for value in vars(module).values() if isinstance(value, Kernel)]
    assert any(kernel.torch.__module__ == module.__name__ for kernel in kernels)
    for kernel in kernels:
        assert inspect.signature(kernel.triton) == inspect.signature(kernel.torch), kernel.__name__
