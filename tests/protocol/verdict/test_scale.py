import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.evidence import log_path
from proofserve.protocol.verdict.scale import CONVICTING, ScaleFit, SizeBets, fitted

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


@pytest.mark.parametrize("share", [1e-6, 0.5, 0.999, 1 - 1e-9])
@pytest.mark.parametrize("shapes", [(0.5, 0.5), (20.0, 12.0), (1000.0, 1.0), (1.0, 1000.0)])
def test_a_quantile_is_that_of_scipy(share: float, shapes: tuple[float, float]) -> None:
    u = stats.betaprime.ppf(share, *(each / 2 for each in shapes))
    assert ScaleFit(S, *shapes).quantile(share) == pytest.approx(S * math.sqrt(u), rel=1e-6)


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
        bets = SizeBets(fit, distances, CONVICTING)
        assert np.isfinite(bets.log_factors(distances)).all()


@pytest.fixture(scope="module")
def bets(fit: ScaleFit) -> SizeBets:
    return SizeBets(fit, honest(4000), CONVICTING)


@pytest.mark.parametrize("times", [1.0, 1.4, 1.9])
def test_no_bet_wins_on_honest_errors_and_on_those_of_unknown_kernels(
    bets: SizeBets, times: float
) -> None:
    won = np.exp(bets.log_factors(honest(200_000, seed=1, times=times))).mean(axis=0)
    assert (won < 1.02).all()


def log_after(bets: SizeBets, figures: NDArray[np.float64]) -> float:
    return float(log_path(bets.log_factors(figures)).max())


@pytest.mark.parametrize("times", [1.0, 1.4, 1.9])
def test_honest_evidence_stays_low(bets: SizeBets, times: float) -> None:
    for seed in range(100):
        assert log_after(bets, honest(300, seed + 10, times)) < math.log(1e6)


@pytest.mark.parametrize(("times", "nonces"), [(4.0, 30), (20.0, 8)])
def test_larger_errors_convict(bets: SizeBets, times: float, nonces: int) -> None:
    for seed in range(20):
        assert log_after(bets, honest(nonces, seed, times)) > math.log(1e6)


def test_a_tenth_of_gross_errors_convicts(bets: SizeBets) -> None:
    mixed = honest(300, seed=5)
    mixed[::10] = 1.4
    assert log_after(bets, mixed) > math.log(1e6)


@pytest.mark.parametrize("count", [16, 128, 1000])
def test_a_small_calibration_bets_less_on_one_nonce_and_holds_its_alpha(count: int) -> None:
    """Whatever lies beyond the largest of its figures, one time in ``count / 4``."""
    known = honest(count, seed=3)
    fit = fitted(known)
    made = SizeBets(fit, known, CONVICTING)
    beyond = CONVICTING * known.max() * max(1.5, (46_000 / count) ** (1 / fit.nu2))
    rare = np.append(honest(count // 4 - 1, seed=4), 0.99 * beyond)
    assert np.exp(made.log_factors(rare)).mean(axis=0).max() < 1.6
    assert made.log_factors(rare[-1:]).max() <= math.log(max(1.0, count / 46)) + 1e-9
    # What is far beyond is no rounding, and neither is a claim without a vector.
    gross = made.log_factors(np.array([1.01 * beyond, math.inf]))
    assert np.isfinite(gross).all()
    assert math.log(100) < gross[1].max() <= math.log(1000)


@pytest.mark.parametrize("power", [4.0, 8.0])
def test_what_no_rounding_explains_is_further_out_where_honest_tails_are_heavier(
    power: float,
) -> None:
    """No bet wins on a kernel half as rough again, far beyond what 256 nonces have shown."""
    for seed in range(5):
        tails = np.sqrt(np.random.default_rng(seed).f(10.0, power, 100_256))
        known, others = tails[:256], 1.5 * tails[256:]
        made = SizeBets(fitted(known), known, CONVICTING)
        assert np.exp(made.log_factors(others)).mean(axis=0).max() < 1.0


def test_the_density_of_a_logarithm_is_that_of_the_sample() -> None:
    fit = ScaleFit(S, NU1, NU2)
    figures = honest(200_000, seed=7)
    logs = np.log(figures)
    assert fit.log_sd == pytest.approx(logs.std(), rel=0.01)
    assert fit.median == pytest.approx(float(np.median(figures)), rel=0.01)
    edges = np.linspace(logs.mean() - 0.5, logs.mean() + 0.5, 21)
    middle = (edges[1:] + edges[:-1]) / 2
    seen = np.histogram(logs, edges)[0] / len(logs) / np.diff(edges)
    assert np.exp(fit.log_density(np.exp(middle))) == pytest.approx(seen, rel=0.05)


def test_a_shorter_error_is_likelier_and_a_wider_fit_says_less() -> None:
    fit = ScaleFit(S, NU1, NU2)
    before, after = np.array([(2 * S) ** 2]), np.array([S**2])
    assert fit.log_remaining(before, after)[0] == pytest.approx((NU1 + NU2) / 2 * math.log(2.5))
    assert fit.log_remaining(before, before)[0] == 0.0
    assert (
        0.0 < fit.wider(2.0).log_remaining(before, after)[0] < fit.log_remaining(before, after)[0]
    )


@pytest.mark.parametrize("distances", [[], [1.0], [1.0, 0.0], [1.0, math.nan], [1.0, math.inf]])
def test_distances_that_cannot_be_fitted_are_refused(distances: list[float]) -> None:
    with pytest.raises(ProtocolError, match="figures"):
        fitted(np.array(distances))
