import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.lab.calibrate.noise import distances_needed, noise, pairs_of, require_enough
from proofserve.lab.client.errors import LabError
from proofserve.protocol.codec import encode
from proofserve.protocol.errors import MalformedVector
from proofserve.protocol.verdict.comparison import Claim

K = 12
RATE = 0.01
# How far apart bfloat16 and float32 are, roughly, and a tail that is no normal one.
SHAPE, SCALE = 8.0, 0.0015


def sample(count: int, seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).gamma(SHAPE, SCALE, count)


def claims(nonces: range, seed: int = 0) -> list[Claim]:
    rows = np.random.default_rng(seed).normal(size=(len(nonces), K))
    return [Claim(n, text) for n, text in zip(nonces, encode(rows.astype(np.float32)), strict=True)]


def test_the_threshold_keeps_its_rate_as_often_as_it_says() -> None:
    truth = sample(1_000_000, seed=1)
    found = [noise(sample(400, seed), RATE) for seed in range(2, 402)]
    too_low = sum((truth > each.dist_threshold).mean() > RATE for each in found)
    # 1 time in 40 at most: 10 of 400, and three standard deviations.
    assert too_low <= 10 + 3 * 10**0.5
    true_quantile = np.quantile(truth, 1 - RATE)
    held = sum(each.interval[0] <= true_quantile <= each.interval[1] for each in found)
    assert held >= 0.95 * 400 - 3 * (400 * 0.95 * 0.05) ** 0.5
    assert all(e.interval[0] <= e.quantile <= e.interval[1] <= e.dist_threshold for e in found)


def test_a_safe_end_is_not_rounded_below_itself() -> None:
    for seed in range(50):
        found = noise(sample(400, seed), RATE)
        assert 1.0 <= found.dist_threshold / found.interval[1] < 1.01
    assert noise(np.zeros(400), RATE).dist_threshold == 0.0


def test_the_quantile_is_one_that_so_many_exceed() -> None:
    found = noise(sample(400, 0), RATE)
    assert int((found.distances > found.quantile).sum()) == 4


@pytest.mark.parametrize(("rate", "needed"), [(0.1, 36), (0.01, 368), (0.001, 3688)])
def test_too_few_distances_are_refused_with_what_would_do(rate: float, needed: int) -> None:
    assert distances_needed(rate) == needed
    noise(sample(needed, 0), rate)
    with pytest.raises(LabError, match=f"are too few for a rate of {rate:g}.*takes {needed}"):
        noise(sample(needed - 1, 0), rate)


def test_the_rate_that_is_offered_instead_is_accepted() -> None:
    with pytest.raises(LabError, match=r"--rate 0\.037$"):
        require_enough(100, RATE)
    require_enough(100, 0.037)


def test_pairs_are_of_one_nonce_each() -> None:
    one, other = claims(range(5)), claims(range(5), seed=1)
    pairs = pairs_of(one, other[::-1], K)
    assert np.array_equal(pairs.distances, pairs_of(one, other, K).distances)
    assert pairs_of(one, one, K).distances.tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (claims(range(5)), claims(range(1, 6)), "only one engine has 2 of the nonces, nonce 0 for"),
        (claims(range(5)), claims(range(4)), "only one engine has 1 of the nonces, nonce 4 for"),
        (claims(range(5)) * 2, claims(range(5)), "one engine has a nonce twice"),
        ([], [], "no artifact to compare"),
    ],
)
def test_what_has_no_partner_is_no_noise(
    one: list[Claim], other: list[Claim], message: str
) -> None:
    with pytest.raises(LabError, match=message):
        pairs_of(one, other, K)


def test_a_broken_vector_is_no_noise() -> None:
    with pytest.raises(MalformedVector):
        pairs_of([Claim(0, "")], claims(range(1)), K)
