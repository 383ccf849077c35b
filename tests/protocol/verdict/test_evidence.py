import math

import numpy as np
import pytest

from proofserve.protocol.verdict.evidence import log_path, mixed


def test_evidence_is_the_mean_of_the_products() -> None:
    path = np.exp(log_path(np.log([[2.0, 0.5], [3.0, 0.1]])))
    assert path.tolist() == pytest.approx([1.0, (2.0 + 0.5) / 2, (6.0 + 0.05) / 2])
    assert log_path(np.empty((0, 2))).tolist() == [0.0]


def test_evidence_does_not_overflow() -> None:
    path = log_path(np.tile([10.0, -10.0], (1000, 1)))
    assert path[-1] == pytest.approx(10_000 - math.log(2))


@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
def test_a_share_of_forged_nonces_has_a_mean_of_one_if_the_ratio_has(share: float) -> None:
    ratios = np.array([0.25, 1.75])
    assert np.exp(mixed(np.log(ratios), share)).mean() == pytest.approx(1.0)
    # A nonce that says nothing against the rest of the node costs the share alone.
    nothing = mixed(np.array([-1e3]), share)[0]
    assert nothing == pytest.approx(math.log1p(-share) if share < 1.0 else -1e3)
