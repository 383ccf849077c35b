import math

import numpy as np
import pytest

from proofserve.protocol.verdict.evidence import Evidence, mixed


def test_evidence_is_the_mean_of_the_products() -> None:
    evidence = Evidence(2)
    evidence.add(np.log([2.0, 0.5]))
    evidence.add(np.log([3.0, 0.1]))
    assert math.exp(evidence.log) == pytest.approx((6.0 + 0.05) / 2)


def test_evidence_does_not_overflow() -> None:
    evidence = Evidence(2)
    for _ in range(1000):
        evidence.add(np.array([10.0, -10.0]))
    assert evidence.log == pytest.approx(10_000 - math.log(2))


@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
def test_a_share_of_forged_nonces_has_a_mean_of_one_if_the_ratio_has(share: float) -> None:
    ratios = np.array([0.25, 1.75])
    assert np.exp(mixed(np.log(ratios), share)).mean() == pytest.approx(1.0)
    # A nonce that says nothing against the rest of the node costs the share alone.
    nothing = mixed(np.array([-1e3]), share)[0]
    assert nothing == pytest.approx(math.log1p(-share) if share < 1.0 else -1e3)
