import math

import numpy as np
import pytest
from scipy.stats import binom

from proofserve.verifier.target import (
    THEORY_MEAN,
    THEORY_SD,
    Distances,
    calibrate,
    interval_ranks,
    quantile_interval,
    sampling_spread,
)

# The tenth part of the normal distribution lies below this many standard deviations.
TENTH = -1.2815515655446004


def ladder(blocks: int, keys: int, per_key: int) -> Distances:
    """1, 2, 3, ... dealt out in turns, so that every block and key has the same quantiles."""
    values = np.arange(1.0, 1.0 + blocks * keys * per_key)
    return values.reshape(per_key, blocks, keys).transpose(1, 2, 0)


def test_theory_is_what_two_random_directions_show() -> None:
    draw = np.random.default_rng(1)
    points = draw.normal(size=(2000, 8192))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    target = np.zeros(8192)
    target[0] = 1.0
    distances = np.linalg.norm(points - target, axis=1)
    assert distances.mean() == pytest.approx(THEORY_MEAN, abs=4 * THEORY_SD / math.sqrt(2000))
    assert distances.std() == pytest.approx(THEORY_SD, rel=0.07)


def test_mean_sd_target_and_rates_of_known_numbers() -> None:
    found = calibrate(ladder(2, 2, 100), 0.10)
    assert found.r_target == pytest.approx(40.9)
    assert found.mean == pytest.approx(200.5)
    assert found.sd == pytest.approx(math.sqrt((400**2 - 1) / 12))
    assert found.rates.tolist() == [[0.10, 0.10], [0.10, 0.10]]
    assert (found.block_rates, found.spread) == ([0.10, 0.10], 0.0)


def test_another_rate_has_another_target() -> None:
    assert calibrate(ladder(2, 2, 100), 0.58).r_target == pytest.approx(1 + 0.58 * 399)


def test_the_target_itself_does_not_win() -> None:
    found = calibrate(np.ones((2, 1, 100)), 0.10)
    assert found.r_target == 1.0
    assert found.block_rates == [0.0, 0.0]


def test_the_spread_is_between_blocks_and_not_between_keys() -> None:
    distances = np.full((3, 2, 50), 2.0)
    distances[0, 0, :20] = 1.0
    distances[1, :, :5] = 1.0
    distances[2, 1, :3] = 1.0
    found = calibrate(distances, 0.2)
    assert found.rates.tolist() == [[0.4, 0.0], [0.1, 0.1], [0.0, 0.06]]
    assert found.block_rates == pytest.approx([0.2, 0.1, 0.03])
    assert found.spread == pytest.approx(17.0)


def test_the_interval_holds_the_true_target_19_times_in_20() -> None:
    draw = np.random.default_rng(7)
    true = THEORY_MEAN + TENTH * THEORY_SD
    held = 0
    for _ in range(1000):
        low, high = quantile_interval(draw.normal(THEORY_MEAN, THEORY_SD, 400), 0.10)
        held += low <= true < high
    # Ranks are whole numbers, so it may be a little more often.
    assert 930 <= held <= 975


def test_more_nonces_give_a_narrower_interval() -> None:
    draw = np.random.default_rng(3)
    few, many = draw.normal(size=400), draw.normal(size=40_000)
    narrow, wide = (np.ptp(quantile_interval(values, 0.10)) for values in (many, few))
    # By the square root of their number.
    assert wide / narrow == pytest.approx(10.0, rel=0.4)


def test_ranks_agree_with_the_binomial_distribution() -> None:
    binomial = binom(6048, 0.10)
    low, high = interval_ranks(6048, 0.10)
    assert binomial.cdf(low - 1) <= 0.025 < binomial.cdf(low)
    assert binomial.sf(high - 1) <= 0.025 < binomial.sf(high - 2)


def test_the_interval_is_made_of_the_values_at_those_ranks() -> None:
    values = np.random.default_rng(2).permutation(np.arange(1.0, 1001.0))
    assert quantile_interval(values, 0.10) == interval_ranks(1000, 0.10)


@pytest.mark.parametrize(("count", "rate"), [(35, 0.10), (35, 0.90), (1, 0.5)])
def test_too_few_nonces_are_refused_in_words(count: int, rate: float) -> None:
    with pytest.raises(ValueError, match=f"{count} nonces are too few for a rate of {rate}"):
        interval_ranks(count, rate)


def test_just_enough_nonces_reach_to_the_extremes() -> None:
    assert interval_ranks(36, 0.10)[0] == 1
    assert interval_ranks(36, 0.90)[1] == 36


def test_the_sampling_spread_is_the_range_of_equal_blocks() -> None:
    # The 95 % point of the studentised range of 3 with infinite degrees of freedom.
    expected = 3.3145 * 100 * math.sqrt(0.1 * 0.9 / 20_000)
    assert sampling_spread(3, 20_000, 0.10) == pytest.approx(expected, rel=0.02)
    assert sampling_spread(3, 200, 0.10) > 5 * expected


def test_the_sampling_spread_is_the_same_in_every_call() -> None:
    assert sampling_spread(3, 2016, 0.10) == sampling_spread(3, 2016, 0.10)
