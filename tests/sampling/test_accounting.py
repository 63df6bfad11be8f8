import pytest

from dapo.sampling.accounting import MAX_COMPONENTS, _component_metrics
from dapo.types import Score


def test_every_component_of_the_scores_becomes_a_mean_over_the_responses_that_have_it():
    scores = [
        Score(
            1.5, acc=True, extras={"score/math": 1.0, "score/style": 0.5, "extracted": 34, "why": "x", "right": True}
        ),
        Score(0.0, acc=False, extras={"score/math": 0.0, "metric/share": 0.25, "right": False}),
        Score(0.0, extras={"metric/share": 0.75, "note": None, "why": "x"}),
    ]
    assert _component_metrics(scores) == {
        "metric/share": 0.5, "score/math/mean": 0.5, "score/right/mean": 0.5, "score/style/mean": 0.5
    }  # fmt: skip


def test_a_reward_that_invents_names_does_not_flood_the_metrics():
    scores = [Score(0.0, extras={"same": 1.0, f"only {i}": 1.0}) for i in range(200)]
    found = _component_metrics(scores)
    assert len(found) == MAX_COMPONENTS
    assert found["score/same/mean"] == pytest.approx(1.0)
