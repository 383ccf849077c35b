import math

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.protocol.verdict.direction import (
    CALIBRATED_MARGIN,
    CERTIFIED_MARGIN,
    CalibratedDirection,
    CertifiedDirection,
    HonestSpread,
    cosine,
)

# Over a bank of 20 suspects.
CONVICTS_AT = math.log(20 / 1e-6)


def cosines(mean: float, sd: float, count: int, seed: int) -> NDArray[np.float64]:
    return np.clip(np.random.default_rng(seed).normal(mean, sd, count), -1.0, 1.0)


def log_after(test: CertifiedDirection | CalibratedDirection, values: NDArray[np.float64]) -> float:
    for value in values:
        test.add(float(value))
    return test.log


def test_the_cosine_of_vectors() -> None:
    one = np.array([1.0, 0.0], np.float32)
    assert cosine(one, np.array([2.0, 2.0], np.float32)) == pytest.approx(2**-0.5)
    assert cosine(one, np.zeros(2, np.float32)) == 0.0


@pytest.mark.parametrize("leaning", [False, True])
@pytest.mark.parametrize("sd", [0.16, 0.4])
def test_an_honest_node_is_not_convicted(leaning: bool, sd: float) -> None:
    for seed in range(300):
        values = cosines(leaning * CERTIFIED_MARGIN, sd, 300, seed)
        assert log_after(CertifiedDirection(), values) < CONVICTS_AT
        values = cosines(leaning * CALIBRATED_MARGIN, sd, 300, seed)
        assert log_after(CalibratedDirection(HonestSpread(sd)), values) < CONVICTS_AT


@pytest.mark.parametrize(
    ("mean", "sd", "certified", "calibrated"),
    [(0.36, 0.16, 75, 30), (0.90, 0.05, 45, 6), (0.99, 0.005, 45, 4)],
    ids=["int8 g32", "fp8", "int4"],
)
def test_guilty_weights_are_named_within_these_nonces(
    mean: float, sd: float, certified: int, calibrated: int
) -> None:
    for seed in range(100):
        values = cosines(mean, sd, certified, seed)
        assert log_after(CertifiedDirection(), values) >= CONVICTS_AT
        sharper = CalibratedDirection(HonestSpread(0.16))
        assert log_after(sharper, values[:calibrated]) >= CONVICTS_AT
