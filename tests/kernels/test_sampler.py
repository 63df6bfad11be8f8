import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dapo.kernels.sampler import draw, row_key, uniforms
from dapo.types import SamplingParams


def key_tensor(count, serial=0, phase="train", seed=0):
    return torch.tensor([row_key(seed, phase, serial, index) for index in range(count)])


def splitmix64(key, position):
    """Compute the published splitmix64 in Python's unbounded integers."""
    mask = 2**64 - 1
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 100_000))
def test_the_hash_is_splitmix64(key, position):
    found = uniforms(torch.tensor([key]), torch.tensor([position])).item()
    assert found == ((splitmix64(key, position) >> 12) + 0.5) / 2**52
    assert 0 < found < 1


def test_uniforms_are_uniform_over_positions_and_over_rows():
    over_positions = uniforms(key_tensor(1).expand(20_000), torch.arange(20_000))
    over_rows = uniforms(key_tensor(20_000), torch.zeros(20_000, dtype=torch.long))
    for values in (over_positions, over_rows):
        assert stats.kstest(values.numpy(), "uniform").pvalue > 0.001
    pairs = np.corrcoef(over_positions[:-1].numpy(), over_positions[1:].numpy())[0, 1]
    assert abs(pairs) < 0.03


def test_no_two_responses_share_their_random_numbers():
    keys = {
        row_key(seed, phase, serial, index)
        for seed in (0, 1)
        for phase in ("train", "eval")
        for serial in range(50)
        for index in range(16)
    }
    assert len(keys) == 2 * 2 * 50 * 16


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("vocabulary", [40, 256, 700])
def test_samples_follow_the_softmax(vocabulary, temperature):
    torch.manual_seed(vocabulary)
    logits = torch.randn(vocabulary) * 2
    count = 40_000
    draws = uniforms(key_tensor(1).expand(count), torch.arange(count))
    tokens, logprobs = draw(logits.expand(count, -1), draws, SamplingParams(temperature))
    probabilities = (logits.double() / temperature).softmax(-1)
    expected = probabilities.numpy() * count
    observed = np.bincount(tokens.numpy(), minlength=vocabulary)
    common = expected >= 5  # the chi-square test needs at least 5 per cell
    cells = [*zip(observed[common], expected[common], strict=True)]
    if (~common).any():
        cells.append((observed[~common].sum(), expected[~common].sum()))
    seen, wanted = np.array(cells).T
    assert stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 0.001
    torch.testing.assert_close(logprobs.double(), probabilities.log()[tokens], atol=1e-5, rtol=0)


@given(st.integers(0, 2**52 - 1))
def test_the_inverse_cdf_is_the_first_token_whose_cumulative_mass_exceeds_u(bits):
    u = (bits + 0.5) / 2**52
    torch.manual_seed(1)
    logits = torch.randn(600) * 3
    token, _ = draw(logits[None], torch.tensor([u], dtype=torch.float64), SamplingParams())
    cumulative = logits.double().softmax(-1).cumsum(-1)
    low = cumulative[token - 1].item() if token > 0 else 0.0
    assert low - 1e-6 <= u <= cumulative[token].item() + 1e-6


def test_a_token_without_mass_is_never_drawn_even_at_the_ends():
    logits = torch.full((1, 300), float("-inf"))
    logits[0, 100] = logits[0, 290] = 0.0
    for u, token in ((2**-53, 100), (0.25, 100), (0.75, 290), (1 - 2**-53, 290), (1.0, 290)):
        found, logprob = draw(logits, torch.tensor([u], dtype=torch.float64), SamplingParams())
        assert found.item() == token
        assert logprob.item() == pytest.approx(np.log(0.5))


def test_greedy_takes_the_likeliest():
    logits = torch.randn(5, 50)
    tokens, logprobs = draw(logits, torch.full((5,), 0.9, dtype=torch.float64), SamplingParams(temperature=0))
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.6), (5, 0.8), (1, 1.0), (0, 1e-9)])
def test_truncation_keeps_the_set_that_brute_force_keeps_and_its_proportions(top_k, top_p):
    torch.manual_seed(2)
    logits = torch.randn(60) * 2
    order = sorted(range(60), key=lambda i: -logits[i].item())
    order = order[:top_k] if top_k else order
    mass = logits.double().softmax(-1)
    total = sum(mass[i].item() for i in order)
    kept, used = [], 0.0
    for i in order:
        if used >= top_p * total and kept:
            break
        kept.append(i)
        used += mass[i].item()
    count = 20_000
    draws = uniforms(key_tensor(1).expand(count), torch.arange(count))
    tokens, _ = draw(logits.expand(count, -1), draws, SamplingParams(1.0, top_p, top_k))
    assert set(tokens.tolist()) == set(kept)
    expected = np.array([mass[i].item() for i in kept])
    observed = np.array([(tokens == i).sum().item() for i in kept])
    if len(kept) > 1:
        assert stats.chisquare(observed, expected / expected.sum() * count).pvalue > 0.001
