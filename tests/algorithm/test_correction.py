import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo.algorithm.correction import correction_weights

logprob = st.floats(-6, -0.1)
responses = st.lists(st.lists(st.tuples(logprob, logprob), min_size=1, max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize("how", ["truncated", "masked"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@given(rows=responses)
def test_the_weights_agree_with_the_definition(level, how, rows):
    expected = []
    for row in rows:
        ratios = [math.exp(start - old) for start, old in row]
        if level == "sequence":
            ratios = [math.prod(ratios)] * len(ratios)
        if how == "truncated":
            expected += [min(ratio, 2.0) for ratio in ratios]
        else:
            expected += [ratio if 0.5 <= ratio <= 2.0 else 0.0 for ratio in ratios]
    start, old = torch.tensor([pair for row in rows for pair in row], dtype=torch.float64).T
    numbers = torch.tensor([i + 1 for i, row in enumerate(rows) for _ in row])
    found, metrics = correction_weights(start, old, numbers, f"{level}-{how}")
    assert found.tolist() == pytest.approx(expected, rel=1e-9)
    assert metrics["correction/weight"] is found
    acts = [weight in (0.0, 2.0) for weight in found.tolist()]
    assert metrics[f"correction/{how}"].bool().tolist() == acts


@pytest.mark.parametrize("correction", ["token-truncated", "token-masked", "sequence-truncated", "sequence-masked"])
def test_a_sampler_that_agrees_needs_no_correction(correction):
    logprobs = torch.tensor([-1.0, -2.0, -3.0])
    weights, metrics = correction_weights(logprobs, logprobs, torch.tensor([1, 1, 2]), correction)
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert not metrics[f"correction/{correction.partition('-')[2]}"].any()
