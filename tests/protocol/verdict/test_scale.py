import math

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.scale import SCALES, ScaleEvidence, ScaleFit, fitted

S, NU1, NU2 = 0.01, 20.0, 12.0


def honest(count: int, seed: int = 0, times: float = 1.0) -> NDArray[np.float64]:
    """Distances whose squares have the fit's own distribution."""
    drawn = np.random.default_rng(seed)
    return times * S * np.sqrt(drawn.chisquare(NU1, count) / drawn.chisquare(NU2, count))


@pytest.fixture(scope="module")
def fit() -> ScaleFit:
    return fitted(honest(4000))


def test_the_fit_finds_the_distribution_of_its_sample(fit: ScaleFit) -> None:
    assert fit.s == pytest.approx(S, rel=0.15)
    assert fit.nu1 == pytest.approx(NU1, rel=0.25)
    assert fit.nu2 == pytest.approx(NU2, rel=0.25)


def test_a_fit_of_light_tails_has_a_scale_of_their_size() -> None:
    light = S * np.random.default_rng(0).gamma(40.0, 1 / 40.0, 2000)
    fit = fitted(light)
    assert fit.nu2 <= 1000.1
    assert 0.5 < fit.quantile(0.5) / float(np.median(light)) < 2.0
    assert fit.quantile(0.999) == pytest.approx(float(np.quantile(light, 0.999)), rel=0.1)


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("count", [2, 12, 32, 64])
def test_few_distances_have_a_fit(count: int, spread: float) -> None:
    """Also where the likelihood has its maximum at infinity."""
    for seed in range(10):
        distances = S * np.exp(spread * np.random.default_rng(seed).normal(size=count))
        fit = fitted(distances)
        assert distances.min() * 0.99 <= fit.quantile(0.5) <= distances.max() * 1.01
        assert np.isfinite(fit.log_bets(distances)).all()


def test_the_mean_of_a_bet_is_at_most_one_on_honest_distances(fit: ScaleFit) -> None:
    """Also on ones that are 1.4 times as large: the allowance is 1.45."""
    for times in (1.0, 1.4):
        bets = np.exp(fit.log_bets(honest(200_000, seed=1, times=times)))
        assert (bets.mean(axis=0) < 1.02).all()


def log_after(fit: ScaleFit, distances: NDArray[np.float64]) -> float:
    evidence = ScaleEvidence(fit)
    for distance in distances:
        evidence.add(float(distance))
    return evidence.log


@pytest.mark.parametrize("times", [1.0, 1.4])
def test_honest_evidence_stays_low(fit: ScaleFit, times: float) -> None:
    for seed in range(100):
        assert log_after(fit, honest(300, seed + 10, times)) < math.log(1e6)


@pytest.mark.parametrize(("times", "nonces"), [(3.0, 20), (10.0, 6)])
def test_larger_errors_convict(fit: ScaleFit, times: float, nonces: int) -> None:
    for seed in range(20):
        assert log_after(fit, honest(nonces, seed, times)) > math.log(1e6)


def test_a_tenth_of_gross_errors_convicts(fit: ScaleFit) -> None:
    mixed = honest(300, seed=5)
    mixed[::10] = 1.4
    assert log_after(fit, mixed) > math.log(1e6)


def test_an_infinite_distance_counts_as_much_as_the_cap_allows(fit: ScaleFit) -> None:
    bets = fit.log_bets(np.array([math.inf, 1e6]))
    assert np.isfinite(bets).all()
    assert bets[0] == pytest.approx(bets[1])
    assert len(bets[0]) == len(SCALES)
    assert bets.max() <= math.log(1000.0)


@pytest.mark.parametrize("distances", [[], [1.0], [1.0, 0.0], [1.0, math.nan], [1.0, math.inf]])
def test_distances_that_cannot_be_fitted_are_refused(distances: list[float]) -> None:
    with pytest.raises(ProtocolError, match="distances"):
        fitted(np.array(distances))
