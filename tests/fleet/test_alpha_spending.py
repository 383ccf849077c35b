"""A member's verdicts of 24 hours, however they come, have shares of at most one day's alpha."""

from collections.abc import Sequence

import numpy as np
import pytest

from proofserve.fleet.verification_records import DAY_S, VerificationRule
from proofserve.protocol.verdict.counting import share_of_alpha

MINUTE_S, HOUR_S = 60.0, 3600.0
# A round that ends is sampled once more, and an operator asks when he likes.
BURST = [3 * HOUR_S + second for second in range(500)]
RANDOM = np.cumsum(np.random.default_rng(7).exponential(20 * MINUTE_S, 400)).tolist()
ON_TIME = np.arange(0.0, 4 * DAY_S, MINUTE_S).tolist()


def shares_of(times: Sequence[float], planned: int) -> np.ndarray:
    """The share of each verification of a member, one after another."""
    at, shares = np.array(times), np.zeros(len(times))
    for number, now in enumerate(times):
        of_day = shares[:number][at[:number] > now - DAY_S]
        shares[number] = share_of_alpha(float(of_day.sum()), len(of_day), planned)
    return shares


@pytest.mark.parametrize("planned", [0, 24, 1440])
@pytest.mark.parametrize(
    "times",
    [ON_TIME, BURST, RANDOM, sorted([*ON_TIME[:3000], *BURST]), [0.0] * 50],
    ids=["each minute", "a burst", "at random", "each minute and a burst", "at once"],
)
def test_no_24_hours_spend_more_than_the_alpha_of_a_day(
    times: Sequence[float], planned: int
) -> None:
    shares, at = shares_of(times, planned), np.array(times)
    assert shares.min() > 0.0
    ends = np.searchsorted(at, at + DAY_S, side="left")
    sums = np.concatenate([[0.0], np.cumsum(shares)])
    assert (sums[ends] - sums[: len(at)]).max() <= 1.0


def test_verdicts_by_the_clock_have_much_the_same_share() -> None:
    shares = shares_of(ON_TIME, VerificationRule(40, every_s=MINUTE_S).planned_per_day)
    assert shares[0] == 1 / 1442
    assert shares.min() > 1 / 1442 / np.e / 1.01
    assert shares[-1440:].sum() == pytest.approx(0.5, abs=0.1)


def test_without_a_plan_the_shares_are_those_of_a_series() -> None:
    assert VerificationRule(40, every_nonces=1000).planned_per_day == 0
    assert shares_of([0.0] * 4, 0) == pytest.approx([1 / 2, 1 / 6, 1 / 12, 1 / 20])


def test_an_honest_member_is_rarely_convicted_in_a_day_of_verdicts() -> None:
    """Each verdict is a test that is wrong exactly as often as its alpha allows."""
    days, alpha = 4000, 0.05
    shares = shares_of(np.arange(0.0, DAY_S, MINUTE_S).tolist(), 1440)
    convicted = np.random.default_rng(3).random((days, len(shares))) < alpha * shares
    assert 0 < convicted.any(axis=1).mean() <= alpha
