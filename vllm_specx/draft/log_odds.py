"""Beliefs that are all too high or too low: two numbers, learned from what came true."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class LogOdds:
    """log-odds of coming true = shift + scale * log-odds of the belief (Platt, 1999; Cox, 1958).

    beliefs: float64 [n], in (0, 1). doubt: how far from 0 the shift is thought to be before anything came
        true or did not; the scale is thought to be within a third of that around 1.
    """

    def __init__(self, beliefs: FloatArray, doubt: float) -> None:
        odds = np.log(beliefs / (1.0 - beliefs))
        self._features: FloatArray = np.stack([np.ones_like(odds), odds])
        self._prior = np.array([0.0, 1.0])
        self._sure = np.array([doubt, doubt / 3.0]) ** -2
        self._weights: FloatArray = self._prior.copy()

    def learn(self, trials: FloatArray, successes: FloatArray) -> None:
        """All that is known of each belief [n]. One step of Newton's method: nearer each time."""
        p = self.corrected()
        slope = self._features @ (successes - trials * p)
        slope -= (self._weights - self._prior) * self._sure
        curvature = (self._features * (trials * p * (1.0 - p))) @ self._features.T
        curvature += np.diag(self._sure)
        change = np.linalg.solve(curvature, slope)
        self._weights += change / max(1.0, float(np.abs(change).max()) / 0.5)
        self._weights[1] = max(self._weights[1], 0.0)

    def corrected(self) -> FloatArray:
        """float64 [n]: the probability that each comes true."""
        probabilities: FloatArray = 1.0 / (1.0 + np.exp(-(self._weights @ self._features)))
        return probabilities
