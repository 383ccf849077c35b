import math

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.protocol.verdict.directions import Compared, Reach, explained, reach
from proofserve.protocol.verdict.evidence import log_path
from proofserve.protocol.verdict.scale import CONVICTING, ScaleFit

FIT = ScaleFit(1.0, 24.0, 24.0)
WIDE = FIT.wider(CONVICTING)
DIMENSIONS = 128
Floats = NDArray[np.float64]


def compared(
    count: int, *, predicted: float, served: float = 0.0, size: float = 1.0, seed: int = 0
) -> Compared:
    """Errors of ``size`` that point anywhere, with the share ``served`` of a suspect's weights."""
    drawn = np.random.default_rng(seed)

    def anywhere() -> Floats:
        made = drawn.normal(size=(count, DIMENSIONS))
        return made / np.linalg.norm(made, axis=1, keepdims=True)

    moved = predicted * np.exp(drawn.normal(0, 0.2, (count, 1))) * anywhere()
    errors = size * np.exp(drawn.normal(0, 0.12, (count, 1))) * anywhere() + served * moved
    lengths, reaches = np.linalg.norm(errors, axis=1), np.linalg.norm(moved, axis=1)
    return Compared(lengths, reaches, (errors * moved).sum(axis=1) / lengths / reaches)


def log_after(found: Compared) -> float:
    return float(log_path(found.log_factors(WIDE)).max())


@pytest.mark.parametrize("predicted", [1.0, 1.6, 5.0, 25.0])
def test_a_few_nonces_convict_weights_that_move_results_as_rounding_does(predicted: float) -> None:
    for seed in range(20):
        assert log_after(compared(8, predicted=predicted, served=1.0, seed=seed)) > math.log(1e6)


@pytest.mark.parametrize("served", [0.3, 0.5])
def test_weights_that_share_a_part_of_the_prediction_convict_later(served: float) -> None:
    found = compared(200, predicted=1.6, served=served)
    assert log_after(found) > math.log(1e6)
    assert log_after(compared(4, predicted=1.6, served=served)) < math.log(1e6)


@pytest.mark.parametrize("size", [0.1, 0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("predicted", [0.3, 1.0, 3.0, 20.0])
def test_no_bet_wins_on_honest_errors_up_to_twice_as_long(size: float, predicted: float) -> None:
    found = compared(100_000, predicted=predicted, size=size)
    assert np.exp(found.log_factors(WIDE)).mean(axis=0).max() < 1.0
    assert all(
        log_after(compared(300, predicted=predicted, size=size, seed=seed)) < math.log(1e6)
        for seed in range(1, 20)
    )


def test_one_nonce_rules_a_suspect_out_or_in() -> None:
    honest = compared(1000, predicted=1.6).log_ratio(FIT)
    guilty = compared(1000, predicted=1.6, served=1.0).log_ratio(FIT)
    assert np.quantile(honest, 0.99) < -2.0
    assert np.quantile(guilty, 0.01) > 2.0


def test_a_claim_without_a_vector_says_nothing() -> None:
    none = Compared(np.array([math.nan]), np.array([1.0]), np.array([math.nan]))
    assert none.log_ratio(FIT).tolist() == [0.0]
    assert none.log_factors(WIDE) == pytest.approx(np.zeros((1, 9)), abs=1e-12)


def test_lengths_alone_rule_out_what_would_be_far_longer() -> None:
    large, small = Reach(math.log(20.0), 0.3), Reach(math.log(0.9), 0.3)
    honest = np.array([0.8, 1.0, 1.3])
    assert (large.log_ratio(FIT, honest) < -6.0).all()
    # An error of the usual length says little against weights that move results as little.
    assert -2.5 < small.log_ratio(FIT, honest[1:2])[0] < 0.0
    assert small.log_ratio(FIT, np.array([1.5]))[0] > 0.0
    # Longer than the suspect explains: another part of the error may be, so it is not innocent.
    assert large.log_ratio(FIT, np.array([200.0]))[0] >= 0.0


@pytest.mark.parametrize("predicted", [1.0, 1.6, 5.0])
def test_a_guilty_node_is_not_ruled_out_by_lengths(predicted: float) -> None:
    """The mean of honest over guilty is at most about 1 for a guilty node."""
    found = compared(50_000, predicted=predicted, served=1.0)
    known = reach(found.predicted)
    assert np.exp(-known.log_ratio(FIT, found.ratios)).mean() < 1.3


def test_a_reach_of_few_predictions_has_the_widest_spread() -> None:
    # A spread of 0.35, and that of a mean of so few.
    assert reach(np.array([2.0])).sd == pytest.approx(0.35 * math.sqrt(2))
    assert reach(np.array([1.0, 1.1])).sd == pytest.approx(0.35 * math.sqrt(1.5))
    assert reach(np.array([2.0, 2.0, 2.2, 1.9, 2.1])).sd < 0.1
    assert reach(np.array([2.0, 2.0])).log_mean == pytest.approx(math.log(2.0))


def test_what_an_honest_run_explains_speaks_for_no_suspect() -> None:
    """Errors four times as long as usual, to which a suspect and another honest kernel point."""
    count = np.ones(10)
    suspect, like = (
        Compared(4 * count, 5 * count, 0.8 * count),
        Compared(4 * count, 4 * count, 0.9 * count),
    )
    unlike = Compared(4 * count, count, 0.0 * count)
    assert suspect.log_factors(WIDE).max() == pytest.approx(math.log(1000.0))
    assert explained([unlike], WIDE).tolist() == [0.0] * 10
    known = explained([unlike, like], WIDE)
    assert suspect.log_factors(WIDE, known).max() < 0.0
    # A suspect that is likelier than every honest run convicts as it would without them.
    guilty = Compared(6 * count, 6 * count, 0.99 * count)
    other = explained([Compared(6 * count, count, 0.2 * count)], WIDE)
    assert (other > 0.0).all()
    assert guilty.log_factors(WIDE, other).max() == pytest.approx(math.log(1000.0))
    assert explained([], WIDE).tolist() == 0.0
