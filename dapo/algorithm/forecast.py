"""The forecast: predicts the pass rates of prompts from their features, before anything is sampled for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SIZE = 128  # features after the projection
LEAST_GROUPS = 64  # fewer are too few groups to predict from
_HALF_LIFE = 1000  # groups after which a group counts half, because the model has changed since
_RIDGE = 3.0  # penalty on the coefficients, as a number of groups
_DOMAIN = 0xF0CA57  # separates these random numbers from all others


def project(features_Nd: np.ndarray) -> np.ndarray:
    """Return unit vectors in the direction of the features, projected to [N, SIZE] by random signs.

    Such a projection keeps distances approximately. The signs depend only on the number of features.
    """
    width = features_Nd.shape[1]
    signs = 2.0 * np.random.default_rng((_DOMAIN, width)).integers(0, 2, size=(width, SIZE)) - 1
    lengths = np.linalg.norm(features_Nd, axis=1, keepdims=True)
    return (features_Nd / np.maximum(lengths, 1e-12)) @ signs / np.sqrt(SIZE)


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
        """Return the expected pass rates [N]."""
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

    def restore(self, state: Sequence[float]) -> None:
        self.__init__()
        if not state:
            return
        self.count, self.rates = state[:2]
        rest = np.array(state[2:], np.float64)
        self.features_K, self.products_K, upper = np.split(rest, [SIZE, 2 * SIZE])
        rows, columns = np.triu_indices(SIZE)
        self.moments_KK[rows, columns] = self.moments_KK[columns, rows] = upper

    def _upper(self) -> np.ndarray:
        return self.moments_KK[np.triu_indices(SIZE)]
