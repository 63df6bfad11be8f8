"""The forecast: predicts the pass rates of prompts from their features, before anything is sampled for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SIZE = 128  # features after the projection; a change needs a new checkpoint.state.FORMAT
LEAST_GROUPS = 64  # fewer are too few groups to predict from
_HALF_LIFE = 1000  # later groups after which a group's weight is one half, because the model changes
_RIDGE = 3.0  # penalty on the coefficients, as a number of groups
_DOMAIN = 0xF0CA57  # separates these random numbers from all others


def project(features_Nd: np.ndarray) -> np.ndarray:
    """Return unit vectors in the direction of the features, projected to [N, SIZE] by random signs.

    Such a projection keeps distances approximately. The signs depend only on the number of features. Rows with features
    that are not finite become NaN.
    """
    width = features_Nd.shape[1]
    signs = 2.0 * np.random.default_rng((_DOMAIN, width)).integers(0, 2, size=(width, SIZE)) - 1
    lengths = np.linalg.norm(features_Nd, axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # infinity / infinity
        units_Nd = features_Nd / np.maximum(lengths, 1e-12)
    return units_Nd @ signs / np.sqrt(SIZE)


def most_promising(expected_N: np.ndarray, repeats: Sequence[int], count: int) -> np.ndarray:
    """Return whether each prompt [N] is among the `count` with the expected pass rates nearest to one half.

    Prompts with fewer `repeats` come first. A prompt without an expected pass rate (NaN) counts as one half.
    """
    distances_N = np.nan_to_num(np.abs(expected_N - 0.5), nan=0.0)
    promising_N = np.zeros(len(expected_N), bool)
    promising_N[np.lexsort((distances_N, np.array(repeats)))[:count]] = True
    return promising_N


class Forecast:
    """A ridge regression of the pass rate on features, with the run's own groups as data.

    Only weighted sums over the groups are kept, so its state does not grow.
    """

    def __init__(self) -> None:
        self.count = self.rates = 0.0  # weighted sums over groups: of 1, and of their pass rates
        self.features_K, self.products_K = np.zeros(SIZE), np.zeros(SIZE)  # sums of features, and of features x rate
        self.moments_KK = np.zeros((SIZE, SIZE))  # sum of features x features

    def record(self, features_K: np.ndarray, rate: float) -> None:
        """Add a group. All earlier ones count a little less from now on."""
        decay = 0.5 ** (1 / _HALF_LIFE)
        self.count = decay * self.count + 1
        self.rates = decay * self.rates + rate
        self.features_K = decay * self.features_K + features_K
        self.products_K = decay * self.products_K + rate * features_K
        self.moments_KK = decay * self.moments_KK + np.outer(features_K, features_K)

    @property
    def is_ready(self) -> bool:
        return self.count >= LEAST_GROUPS

    def predict(self, features_NK: np.ndarray) -> np.ndarray:
        """Return the expected pass rates [N]: NaN for features that are NaN, and for all before it is ready."""
        if not self.is_ready:
            return np.full(len(features_NK), np.nan)
        mean_K, mean_rate = self.features_K / self.count, self.rates / self.count
        covariance_KK = self.moments_KK / self.count - np.outer(mean_K, mean_K)
        with_rate_K = self.products_K / self.count - mean_rate * mean_K
        # The penalty is relative to the features' variance, so that their scale does not matter.
        penalty = _RIDGE / self.count * max(np.trace(covariance_KK), 1e-12)
        coefficients_K = np.linalg.solve(covariance_KK + penalty * np.eye(SIZE), with_rate_K)
        return np.clip(mean_rate + (features_NK - mean_K) @ coefficients_K, 0.0, 1.0)

    def state(self) -> list[float]:
        """Return all sums as one list of numbers; empty if nothing is recorded."""
        if not self.count:
            return []
        return [self.count, self.rates, *self.features_K.tolist(), *self.products_K.tolist(), *self._upper().tolist()]

    @classmethod
    def of(cls, state: Sequence[float]) -> Forecast:
        """Return the forecast with this `state()`."""
        made = cls()
        if state:
            made.count, made.rates = state[:2]
            made.features_K, made.products_K, upper = np.split(np.array(state[2:], np.float64), [SIZE, 2 * SIZE])
            rows, columns = np.triu_indices(SIZE)
            made.moments_KK[rows, columns] = made.moments_KK[columns, rows] = upper
        return made

    def _upper(self) -> np.ndarray:
        return self.moments_KK[np.triu_indices(SIZE)]
