import pytest
import torch
from torch import Tensor

from dapo.kernels import head
from tests.kernels.ways import DEVICE, both


def chunk(rows: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = 5 * torch.randn(rows, width, generator=generator)
    return logits.to(DEVICE), torch.randint(width, (rows,), generator=generator).to(DEVICE)


def strided(tensor: Tensor) -> Tensor:
    wide = tensor.new_full((len(tensor), tensor.shape[1] + 3), float("nan"))
    wide[:, :-3] = tensor
    return wide[:, :-3]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize(("rows", "width"), [(5, 24), (3, 9001)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_statistics_match_the_softmax_at_the_temperature(how: str, rows: int, width: int, temperature: float) -> None:
    logits, targets = chunk(rows, width)
    logprobs, entropy, normalizer = getattr(head.logprobs_and_entropy, how)(strided(logits), targets, temperature)
    expected = torch.distributions.Categorical(logits=logits.double() / temperature)
    close(logprobs, expected.log_prob(targets))
    close(entropy, expected.entropy())
    close(normalizer, (logits.double() / temperature).exp().sum(-1).log())
    assert logprobs.dtype == entropy.dtype == normalizer.dtype == torch.float32


@both
@pytest.mark.parametrize("rising", [False, True])
def test_statistics_are_exact_for_extreme_and_impossible_logits_in_any_order(how: str, rising: bool) -> None:
    """Rising logits move the running peak with every block, and whole blocks may be impossible."""
    logits = torch.linspace(-300, 1000, 9001, device=DEVICE).repeat(2, 1)
    logits[0, :5000] = float("-inf")
    logits = logits if rising else logits.flip(1).contiguous()
    targets = logits.argmax(-1)
    logprobs, entropy, normalizer = getattr(head.logprobs_and_entropy, how)(logits, targets, 1.0)
    probabilities = logits.double().softmax(-1)
    close(logprobs, probabilities.amax(-1).log())
    close(entropy, torch.special.entr(probabilities).sum(-1))
    close(normalizer, logits.double().logsumexp(-1))


@both
def test_a_nan_logit_affects_only_its_row(how: str) -> None:
    logits, targets = chunk(3, 9001)
    logits[1, 17] = float("nan")
    for statistic in getattr(head.logprobs_and_entropy, how)(logits, targets, 1.0):
        assert statistic.isnan().tolist() == [False, True, False]


@both
@pytest.mark.parametrize(("rows", "width"), [(5, 24), (3, 9001)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_matches_autograd(how: str, rows: int, width: int, temperature: float) -> None:
    logits, targets = chunk(rows, width)
    grad_logprobs = torch.linspace(-2, 3, rows, device=DEVICE)
    logits64 = logits.double().requires_grad_()
    logprobs64 = (logits64 / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (expected,) = torch.autograd.grad((logprobs64 * grad_logprobs.double()).sum(), logits64)
    normalizer = (logits / temperature).logsumexp(-1)

    gradient = getattr(head.logits_gradient, how)
    out = strided(torch.full_like(logits, 9.0))
    gradient(strided(logits), normalizer, targets, grad_logprobs, temperature, out)
    close(out, expected)
    in_place = logits.clone()
    gradient(in_place, normalizer, targets, grad_logprobs, temperature, in_place)
    close(in_place, expected)


@both
def test_gradient_rounds_once_and_takes_the_expanded_gradient_of_a_sum(how: str) -> None:
    logits, targets = chunk(5, 24)
    out = torch.empty(5, 24, dtype=torch.bfloat16, device=DEVICE)
    ones = torch.ones((), device=DEVICE).expand(5)
    getattr(head.logits_gradient, how)(logits, logits.logsumexp(-1), targets, ones, 1.0, out)
    expected = torch.nn.functional.one_hot(targets, 24) - logits.double().softmax(-1)
    unit = 2**-7 if how == "triton" and DEVICE == "cpu" else 2**-8  # the interpreter truncates
    assert (out.double() - expected).abs().le(expected.abs() * unit * 1.001 + 1e-9).all()


def test_a_kernel_uses_triton_on_a_gpu_and_pytorch_elsewhere() -> None:
    logits, targets = chunk(5, 24)
    how = "triton" if DEVICE == "cuda" else "torch"
    statistics = head.logprobs_and_entropy(logits, targets, 0.7)
    expected = getattr(head.logprobs_and_entropy, how)(logits, targets, 0.7)
    torch.testing.assert_close(statistics, expected, rtol=0, atol=0)
    out, expected_out = torch.empty_like(logits), torch.empty_like(logits)
    head.logits_gradient(logits, statistics[2], targets, statistics[0], 0.7, out)
    getattr(head.logits_gradient, how)(logits, statistics[2], targets, statistics[0], 0.7, expected_out)
    assert torch.equal(out, expected_out)
