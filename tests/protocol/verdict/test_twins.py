"""Twins whose errors are more alike than those of honest kernels."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.protocol.verdict.twins import alikeness, twin_log_clearing

K = 64


def alike(drawn: np.random.Generator, mean: float) -> float:
    """The cosine of two twins' errors, ``mean`` in the mean."""
    shared, one, other = drawn.normal(size=(3, K))
    own = math.sqrt(1 - mean)
    parts = [math.sqrt(mean) * shared + own * part for part in (one, other)]
    return alikeness(np.concatenate(parts).astype(np.float32))


def figures(mean: float, own: float, seed: int) -> NDArray[np.float64]:
    drawn = np.random.default_rng(seed)
    return np.array([alike(drawn, mean) - alike(drawn, own) for _ in range(300)])


def test_the_errors_of_both_halves_are_compared() -> None:
    ones = np.ones(K, np.float32)
    assert alikeness(np.concatenate((ones, 3 * ones))) == pytest.approx(1.0)
    assert alikeness(np.concatenate((ones, -ones))) == pytest.approx(-1.0)


@pytest.mark.parametrize("seed", range(20))
def test_honest_twins_are_cleared_also_beside_other_kernels_than_ours(seed: int) -> None:
    assert twin_log_clearing(figures(0.4, 0.4, seed), honest=0.0).sum() > math.log(1e3)
    # A kernel that was measured to be more alike by 0.17 than our own run.
    assert twin_log_clearing(figures(0.35, 0.18, seed), honest=0.17).sum() > math.log(1e3)
    assert twin_log_clearing(figures(0.1, 0.4, seed), honest=0.0).sum() > math.log(1e3)


@pytest.mark.parametrize("seed", range(20))
def test_wrong_weights_are_not_cleared_whatever_they_are(seed: int) -> None:
    assert twin_log_clearing(figures(0.7, 0.4, seed), honest=0.0).sum() < 0
