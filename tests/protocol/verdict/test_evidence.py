import math

import numpy as np
import pytest

from proofserve.protocol.verdict.evidence import Evidence, symmetric_log_factors

BETS = np.array([0.5, 1.0, 2.0, 4.0])


def test_evidence_is_the_mean_of_the_products() -> None:
    evidence = Evidence(2)
    evidence.add(np.log([2.0, 0.5]))
    evidence.add(np.log([3.0, 0.1]))
    assert evidence.nonces == 2
    assert math.exp(evidence.log) == pytest.approx((6.0 + 0.05) / 2)


def test_evidence_does_not_overflow() -> None:
    evidence = Evidence(2)
    for _ in range(1000):
        evidence.add(np.array([10.0, -10.0]))
    assert evidence.log == pytest.approx(10_000 - math.log(2))


@pytest.mark.parametrize("size", [0.001, 0.3, 1.0, 5.0])
def test_a_fair_sign_wins_nothing_in_the_mean(size: float) -> None:
    up, down = symmetric_log_factors(size, BETS), symmetric_log_factors(-size, BETS)
    assert ((np.exp(up) + np.exp(down)) / 2 <= 1.0 + 1e-12).all()
