import math

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.directions import (
    KEPT,
    Footprint,
    cosine,
    emulated_footprint,
    footprint,
    levelled,
)
from proofserve.protocol.verdict.evidence import log_path

OF_A_SERVER = Footprint(0.6, 0.08)
NEARLY_ALL = 0.86


def kept(mean: float, count: int, seed: int = 0, sd: float = 0.08) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(mean, sd, count)


def test_a_cosine_has_a_sign_and_no_unit() -> None:
    ones = np.ones(4, np.float32)
    assert cosine(ones, 3 * ones) == pytest.approx(1.0)
    assert cosine(ones, -ones) == pytest.approx(-1.0)
    assert cosine(ones, np.zeros(4, np.float32)) == 0.0


def test_an_honest_node_is_cleared_after_few_nonces_and_of_a_share_after_more() -> None:
    figures = kept(0.6, 200)
    of_all = OF_A_SERVER.log_clearing(figures, 1.0, NEARLY_ALL)[:, 0].cumsum()
    of_tenth, finer = OF_A_SERVER.log_clearing(figures, 0.1, NEARLY_ALL).cumsum(axis=0).T
    assert 1 <= int(np.argmax(of_all >= math.log(1e3))) + 1 <= 3
    # (0.9 / 0.95)^128 is a thousandth: a twentieth of the nonces of an honest node may be odd.
    assert 128 <= int(np.argmax(of_tenth >= math.log(1e3))) + 1 <= 150
    # A small part that is missing everywhere takes more than one nonce, too.
    assert 4 <= int(np.argmax(finer >= math.log(1e3))) + 1 <= 16


def test_an_error_that_is_far_longer_than_ours_shows_less() -> None:
    cosines = np.array([0.42, 0.42, 0.42, np.nan, -0.42])
    shown = OF_A_SERVER.figures(cosines, np.array([1.4, 3.0, np.inf, 0.1, 3.0]))
    assert shown.tolist() == [0.42, 0.21, 0.0, 0.6, -0.42]
    # A cache in fp8 kept so much in some nonces of SmolLM2, with errors of 2.3 to 5.2 times ours.
    honest, lie, *_ = OF_A_SERVER.log_lie(shown, KEPT)
    assert honest < 0.0 < lie


@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
def test_other_weights_are_cleared_as_rarely_as_beta_says(share: float) -> None:
    drawn, most = np.random.default_rng(1), 200
    shape = (4000, most)
    lies = np.where(
        drawn.random(shape) < share,
        drawn.normal(KEPT * 0.6, 0.08, shape),
        drawn.normal(0.6, 0.08, shape),
    )
    clearing = OF_A_SERVER.log_clearing(lies.ravel(), share, NEARLY_ALL)[:, 0].reshape(shape)
    cleared = (clearing.cumsum(axis=1) >= math.log(1e3)).any(axis=1)
    assert cleared.mean() <= 2e-3


def test_a_lie_that_keeps_four_fifths_everywhere_is_cleared_as_rarely() -> None:
    lies = np.random.default_rng(2).normal(NEARLY_ALL * 0.6, 0.08, (4000, 200))
    clearing = OF_A_SERVER.log_clearing(lies.ravel(), 0.3, NEARLY_ALL)[:, 1].reshape(lies.shape)
    assert (clearing.cumsum(axis=1) >= math.log(1e3)).any(axis=1).mean() <= 2e-3


def test_what_keeps_three_fifths_is_between_honest_and_other_weights() -> None:
    middle = (1 + KEPT) / 2 * 0.6
    assert OF_A_SERVER.log_lie(np.array([middle]), KEPT)[0] == pytest.approx(0.0, abs=1e-9)
    assert OF_A_SERVER.log_lie(np.array([0.6]), KEPT)[0] < -1.0
    assert OF_A_SERVER.log_lie(np.array([0.1]), KEPT)[0] == pytest.approx(math.log(1000.0))


def refuted_after(of: Footprint, figures: NDArray[np.float64]) -> int | None:
    reached = log_path(of.log_refuting(figures)) >= math.log(1e6)
    return int(reached.argmax()) if reached.any() else None


def test_a_kernel_that_a_node_does_not_have_is_refuted_and_its_own_is_not() -> None:
    assert all(refuted_after(OF_A_SERVER, kept(0.6, 1000, seed)) is None for seed in range(50))
    assert all((refuted_after(OF_A_SERVER, kept(0.1, 20, seed)) or 99) <= 8 for seed in range(50))
    half = np.where(np.arange(60) % 2, kept(0.6, 60), kept(0.1, 60))
    assert refuted_after(OF_A_SERVER, half) is not None


@pytest.mark.parametrize("mean", [0.58, 0.6, 0.67, 0.68])
def test_what_servers_were_seen_to_keep_is_cleared_by_an_emulation(mean: float) -> None:
    """Means of vLLM 0.32 on three models and two processors."""
    known = emulated_footprint(128)
    clearing = known.log_clearing(kept(mean, 100, sd=0.1), 0.3, NEARLY_ALL).cumsum(axis=0)
    assert (clearing.min(axis=1) >= math.log(1e3)).any()


@pytest.mark.parametrize(
    ("between_orders", "mean"),
    [
        (0.58, 0.56),
        (0.55, 0.55),
        (0.58, 0.57),
        (0.67, 0.67),
        (0.65, 0.64),
        (0.68, 0.65),
        (0.7, 0.68),
    ],
)
def test_a_server_that_keeps_what_two_orders_keep_is_cleared(
    between_orders: float, mean: float
) -> None:
    """Of vLLM 0.32 with AMX on one rank and on two, without it, with AVX2; a mixture; SmolLM2."""
    known = emulated_footprint(128, kept(between_orders, 40, seed=1, sd=0.07).tolist())
    clearing = known.log_clearing(kept(mean, 100, sd=0.08), 0.3, NEARLY_ALL).cumsum(axis=0)
    assert (clearing.min(axis=1) >= math.log(1e3)).any()


def test_the_spread_of_few_figures_is_taken_wider() -> None:
    few, many = footprint(kept(0.6, 8)), footprint(kept(0.6, 800))
    assert many.mean == pytest.approx(0.6, abs=0.01)
    assert many.sd == pytest.approx(0.08, rel=0.15)
    assert few.sd > 1.2 * many.sd
    assert footprint(np.full(20, 0.7)).sd > 0.0
    with pytest.raises(ProtocolError, match="footprints"):
        footprint(np.array([0.5]))


def test_two_orders_of_our_own_sums_say_how_much_an_order_takes() -> None:
    alone = emulated_footprint(128)
    assert (alone.mean, round(alone.sd, 3)) == (0.6, 0.133)
    # A small model whose sums are so short that their order hardly matters.
    short = emulated_footprint(128, [0.97] * 4)
    assert 0.9 < short.mean < 0.97
    # Its int8 keeps two fifths of that: on a part of the nonces it would look like a usual server.
    lie = np.where(np.arange(400) % 10 > 2, kept(0.97, 400, sd=0.05), kept(0.4, 400, sd=0.15))
    usual = emulated_footprint(128, kept(0.6, 24, sd=0.07).tolist())
    assert (lie_excluded(usual, lie), lie_excluded(short, lie)) == (False, True)
    # As with AMX, and where an order leaves nearly nothing alike.
    between = kept(0.57, 60, sd=0.07)
    assert emulated_footprint(128, between.tolist()).mean == pytest.approx(0.98 * between.mean())
    assert emulated_footprint(128, [0.3] * 4).mean == 0.5


def test_the_spread_of_a_few_cosines_is_between_theirs_and_the_usual_one() -> None:
    few, many = (
        emulated_footprint(128, kept(0.6, count, sd=0.07).tolist()).sd for count in (4, 400)
    )
    assert 0.05 <= many < 0.07 < few < emulated_footprint(128).sd
    # A real model, whose rounding is amplified in some nonces.
    assert emulated_footprint(128, kept(0.6, 400, sd=0.14).tolist()).sd > 0.11


def test_a_lie_of_a_model_whose_nonces_differ_is_excluded_once_figures_are_levelled() -> None:
    """As on SmolLM2: a server and our two orders have more in common in some nonces, both."""
    drawn, shape = np.random.default_rng(3), (2000, 200)
    between = np.clip(drawn.normal(0.6, 0.14, shape), 0.1, 0.95)
    server = 0.6 + 0.8 * (between - 0.6) + drawn.normal(0.0, 0.07, shape)

    def cleared(kept_of_it: float) -> float:
        ends = 0
        for figures, orders in zip(kept_of_it * server, between, strict=True):
            known = emulated_footprint(128, orders.tolist())
            shown = levelled(figures, orders, float(orders.mean()))
            path = known.log_clearing(shown, 0.3, NEARLY_ALL).cumsum(axis=0).min(axis=1)
            ends += bool((path >= math.log(1e3)).any())
        return ends / shape[0]

    assert cleared(1.0) > 0.999
    assert cleared(0.85) <= 2e-3


def lie_excluded(known: Footprint, figures: NDArray[np.float64]) -> bool:
    """Whether these figures never clear a node."""
    clearing = known.log_clearing(figures, 0.3, NEARLY_ALL).cumsum(axis=0).min(axis=1)
    return not (clearing >= math.log(1e3)).any()


def test_a_kernel_unlike_the_reference_has_no_footprint_that_clears() -> None:
    assert OF_A_SERVER.is_known
    assert not Footprint(0.02, 0.1).is_known


def test_few_values_spread_more_and_are_not_refuted_by_that() -> None:
    few, many = emulated_footprint(12), emulated_footprint(128)
    assert (few.mean, round(many.sd, 2)) == (many.mean, 0.13)
    assert few.sd > 0.2
    for seed in range(50):
        assert refuted_after(few, kept(few.mean, 200, seed, sd=0.23)) is None
