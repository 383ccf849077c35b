"""Twins whose errors are more alike than those of the validator's own run."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.protocol.verdict.twins import TwinEvidence, alikeness

K = 64


def error(drawn: np.random.Generator, alike: float) -> NDArray[np.float32]:
    """Errors of both twins, whose cosine is ``alike`` in the mean."""
    shared, one, other = drawn.normal(size=(3, K))
    own = math.sqrt(1 - alike)
    parts = (math.sqrt(alike) * shared + own * part for part in (one, other))
    return np.concatenate([*parts]).astype(np.float32)


def evidence(alike: float, own: float, nonces: int, seed: int) -> TwinEvidence:
    found, drawn = TwinEvidence(), np.random.default_rng(seed)
    for _ in range(nonces):
        found.add(error(drawn, alike), error(drawn, own))
    return found


def test_the_errors_of_both_halves_are_compared() -> None:
    ones = np.ones(K, np.float32)
    assert alikeness(np.concatenate((ones, 3 * ones))) == pytest.approx(1.0)
    assert alikeness(np.concatenate((ones, -ones))) == pytest.approx(-1.0)


@pytest.mark.parametrize("seed", range(20))
def test_honest_twins_are_cleared_and_never_convicted(seed: int) -> None:
    found, drawn = TwinEvidence(), np.random.default_rng(seed)
    highest = -math.inf
    for _ in range(300):
        found.add(error(drawn, 0.4), error(drawn, 0.4))
        highest = max(highest, found.log)
    assert highest < math.log(1e6)
    assert found.log_clearing > math.log(1e3)


@pytest.mark.parametrize("seed", range(20))
def test_wrong_weights_convict_whatever_they_are(seed: int) -> None:
    found = evidence(0.7, 0.4, 150, seed)
    assert found.log > math.log(1e6)
    assert found.log_clearing < 0


def test_less_alike_errors_than_our_own_are_no_evidence() -> None:
    """A node in float16 errs less than a validator's run in bfloat16."""
    found = evidence(0.1, 0.4, 200, seed=0)
    assert found.log < 0
    assert found.log_clearing > math.log(1e3)
