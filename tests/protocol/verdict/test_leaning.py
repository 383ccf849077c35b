import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.evidence import Evidence
from proofserve.protocol.verdict.leaning import (
    LEANING_BETS,
    LEAST_MARGIN,
    UNCALIBRATED_BETS,
    UNCALIBRATED_MARGIN,
    HonestLean,
    cosine,
    honest_lean,
    own_share,
    uncalibrated_log_factors,
)

# Over a bank of 20 suspects.
CONVICTS_AT = math.log(20 / 1e-6)
Floats = NDArray[np.float64]


def cosines(mean: float, sd: float, count: int, seed: int) -> Floats:
    return np.clip(np.random.default_rng(seed).normal(mean, sd, count), -1.0, 1.0)


def log_after(factors: Floats) -> float:
    evidence = Evidence(factors.shape[1])
    for row in factors:
        evidence.add(row)
    return evidence.peak


def lean(sd: float) -> HonestLean:
    return HonestLean(mean=0.0, sd=sd, margin=LEAST_MARGIN, share=0.0)


def test_the_cosine_of_vectors() -> None:
    one = np.array([1.0, 0.0], np.float32)
    assert cosine(one, np.array([2.0, 2.0], np.float32)) == pytest.approx(2**-0.5)
    assert cosine(one, np.zeros(2, np.float32)) == 0.0


@pytest.mark.parametrize("leaning", [False, True])
@pytest.mark.parametrize("sd", [0.16, 0.4])
def test_an_honest_node_is_not_convicted(leaning: bool, sd: float) -> None:
    for seed in range(300):
        values = cosines(leaning * UNCALIBRATED_MARGIN, sd, 300, seed)
        assert log_after(uncalibrated_log_factors(values)) < CONVICTS_AT
        values = cosines(leaning * LEAST_MARGIN, sd, 300, seed)
        assert log_after(lean(sd).log_factors(values)) < CONVICTS_AT


@pytest.mark.parametrize(
    ("mean", "sd", "uncalibrated", "calibrated"),
    [(0.36, 0.16, 75, 30), (0.90, 0.05, 45, 6), (0.99, 0.005, 45, 4)],
    ids=["int8 g32", "fp8", "int4"],
)
def test_guilty_weights_are_named_within_these_nonces(
    mean: float, sd: float, uncalibrated: int, calibrated: int
) -> None:
    for seed in range(100):
        values = cosines(mean, sd, uncalibrated, seed)
        assert log_after(uncalibrated_log_factors(values)) >= CONVICTS_AT
        assert log_after(lean(0.16).log_factors(values[:calibrated])) >= CONVICTS_AT


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dimensions", [11, 64])
def test_no_bet_wins_on_random_directions(share: float, dimensions: int) -> None:
    """Differences of two cosines with random vectors, as honest errors and our own are."""
    drawn = np.random.default_rng(0)
    pairs = drawn.normal(size=(2, 100_000, dimensions))
    first = (pairs / np.linalg.norm(pairs, axis=2, keepdims=True))[..., 0]
    figures = first[0] - share * first[1]
    factors = honest_lean(figures, share).log_factors(figures)
    assert factors.shape == (100_000, LEANING_BETS)
    assert (np.exp(factors).mean(axis=0) < 1.0).all()


def test_very_small_honest_cosines_do_not_make_one_nonce_decisive() -> None:
    """As of a node in float32, of which most vectors are the published ones."""
    factors = HonestLean(mean=0.0, sd=0.005, margin=0.05, share=0.3).log_factors(np.zeros(3))
    assert np.isfinite(factors).all()
    assert factors.max() < 0.0


@pytest.mark.parametrize("count", [2, 5, 48, 1000])
def test_the_bound_on_the_deviation_is_by_a_chi_square(count: int) -> None:
    figures = np.linspace(-0.5, 0.5, count)
    ratio = figures.std(ddof=1) / honest_lean(figures, 0.0).sd
    assert stats.chi2.cdf((count - 1) * ratio**2, count - 1) == pytest.approx(0.01)


def test_a_measured_lean_becomes_the_margin() -> None:
    figures = cosines(0.3, 0.1, 400, 0)
    found = honest_lean(figures, share=1.0)
    assert found.mean == pytest.approx(0.3, abs=0.02)
    assert 0.3 < found.margin < 0.33
    assert 0.1 < found.sd < 0.115
    wider = found.wider(2.0)
    assert (wider.sd, wider.margin) == (2 * found.sd, 2 * found.margin)
    assert log_after(found.log_factors(cosines(0.3, 0.1, 1000, 1))) < CONVICTS_AT


def test_a_model_that_leads_every_error_one_way_is_taken_off() -> None:
    """As a mixture near its ties: the nonce decides where errors point, and our own says so."""
    drawn = np.random.default_rng(0)
    of_nonce = drawn.normal(0.3, 0.2, 300)
    ours, theirs = (of_nonce + drawn.normal(0.0, 0.05, 300) for _ in range(2))
    assert own_share([(theirs, ours)]) > 0.9
    alone = drawn.normal(0.0, 0.3, (2, 300))
    assert own_share([(alone[0], alone[1])]) < 0.15
    assert own_share([(np.ones(3), np.ones(3))]) == 0.0


def test_without_a_calibration_one_nonce_says_little() -> None:
    assert uncalibrated_log_factors(np.array([1.9])).shape == (1, UNCALIBRATED_BETS)
    assert uncalibrated_log_factors(np.linspace(-2, 2, 50)).max() <= 0.5


@pytest.mark.parametrize("figures", [[], [0.1]])
def test_too_few_figures_bound_nothing(figures: list[float]) -> None:
    with pytest.raises(ProtocolError, match="cosines"):
        honest_lean(np.array(figures), 0.0)
