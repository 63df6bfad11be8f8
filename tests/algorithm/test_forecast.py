"""Test that the forecast is the weighted ridge regression it claims to be, and that it learns."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dapo.algorithm import forecast
from dapo.algorithm.forecast import SIZE, Forecast, most_promising, project


def recorded(features_NK, rates):
    model = Forecast()
    for row, rate in zip(features_NK, rates, strict=True):
        model.record(row, rate)
    return model


def data(count, seed=0, noise=0.1):
    """Return features, and pass rates that depend on three of them."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(count, SIZE)) * np.linspace(3, 0.1, SIZE)
    rates = 0.6 + features[:, :3] @ [0.05, -0.05, 0.03] + noise * random.normal(size=count)
    return features, np.clip(rates, 0, 1)


@pytest.mark.parametrize("count", [70, 300])
def test_predictions_are_those_of_a_weighted_ridge_regression_by_least_squares(count):
    features, rates = data(count)
    found = recorded(features, rates).predict(features[:20])

    weights = 0.5 ** (np.arange(count)[::-1] / 1000)
    mean = weights @ features / weights.sum()
    centered, target = features - mean, rates - weights @ rates / weights.sum()
    penalty = 3 * (weights @ centered**2).sum() / weights.sum()
    # A ridge penalty is one more row per coefficient, whose target is 0.
    rows = np.vstack([np.sqrt(weights)[:, None] * centered, np.sqrt(penalty) * np.eye(SIZE)])
    solution = np.linalg.lstsq(rows, np.concatenate([np.sqrt(weights) * target, np.zeros(SIZE)]), rcond=None)[0]
    expected = np.clip(weights @ rates / weights.sum() + (features[:20] - mean) @ solution, 0, 1)
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_it_learns_to_tell_easy_from_hard_prompts_that_it_has_not_seen():
    features, rates = data(900)
    predicted = recorded(features[:600], rates[:600]).predict(features[600:])
    assert np.corrcoef(predicted, rates[600:])[0, 1] > 0.7
    shuffled = recorded(features[:600], np.random.default_rng(1).permutation(rates[:600])).predict(features[600:])
    assert abs(np.corrcoef(shuffled, rates[600:])[0, 1]) < 0.3


def test_the_scale_and_the_mean_of_the_features_do_not_matter():
    features, rates = data(200)
    plain = recorded(features, rates).predict(features)
    other = recorded(1e-3 * features + 7, rates).predict(1e-3 * features + 7)
    np.testing.assert_allclose(other, plain, atol=1e-4)


def test_forecasts_of_extreme_features_are_rates():
    features, rates = data(200)
    found = recorded(features, rates).predict(1e3 * np.vstack([features, -features]))
    assert (found.min(), found.max()) == (0, 1)


def test_features_that_never_vary_predict_the_mean():
    rates = np.linspace(0, 1, 100)
    found = recorded(np.ones((100, SIZE)), rates).predict(np.ones((3, SIZE)))
    np.testing.assert_allclose(found, rates.mean(), atol=0.01)


def test_it_forgets_groups_of_a_model_that_has_changed_since():
    features, rates = data(400, noise=0)
    model = recorded(features, rates)
    for _ in range(20):
        for row, rate in zip(features, rates, strict=True):
            model.record(row, 1 - rate)
    np.testing.assert_allclose(model.predict(features).mean(), 1 - rates.mean(), atol=0.03)
    assert np.corrcoef(model.predict(features), rates)[0, 1] < -0.7


def test_a_restored_forecast_predicts_the_same_bits():
    features, rates = data(120)
    model = recorded(features, rates)
    other = Forecast.of(json.loads(json.dumps(model.state())))
    model.record(features[0], 0.25)
    other.record(features[0], 0.25)
    assert np.array_equal(other.predict(features), model.predict(features))
    assert Forecast.of(Forecast().state()).state() == []


def test_it_is_ready_after_enough_groups(monkeypatch):
    monkeypatch.setattr(forecast, "LEAST_GROUPS", 5)
    features, rates = data(6)
    assert not recorded(features[:5], rates[:5]).is_ready  # the first ones count a little less than 1
    assert recorded(features, rates).is_ready


def test_the_projection_keeps_the_angles_between_prompts():
    random = np.random.default_rng(0)
    features = random.normal(size=(40, 1536)) + 2 * random.normal(size=1536)
    units = features / np.linalg.norm(features, axis=1, keepdims=True)
    np.testing.assert_allclose(project(features) @ project(features).T, units @ units.T, atol=0.35)
    many = np.mean([abs(project(features) @ project(features).T - units @ units.T)])
    assert many < 0.08
    np.testing.assert_allclose(project(5 * features), project(features))
    assert np.isfinite(project(np.zeros((1, 1536)))).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_features_that_are_not_finite_have_no_projection_and_change_no_other(bad):
    features = np.random.default_rng(0).normal(size=(3, 40))
    expected = project(features)[[0, 2]]
    features[1, 7] = bad
    assert np.isnan(project(features)[1]).all()
    assert np.array_equal(project(features)[[0, 2]], expected)


def test_the_most_promising_prompts_are_nearest_to_one_half_and_repeats_come_last():
    rates = np.array([0.9, 0.45, 0.0, np.nan, 0.6, 0.5])
    assert most_promising(rates, [0, 0, 0, 0, 0, 1], 3).tolist() == [False, True, False, True, True, False]
    assert most_promising(rates, [0, 0, 0, 0, 0, 1], 6).all()
    assert most_promising(rates, [1, 1, 0, 1, 1, 0], 2).tolist() == [False, False, True, False, False, True]
