import math

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.protocol.verdict.chosen_tokens import (
    TILTS,
    greedy_gap,
    greedy_log_bets,
    kernel_log_means,
    moved_apart,
    token_log_factors,
)
from proofserve.protocol.verdict.evidence import RenewedEvidence, log_path, rare_factors

VOCABULARY = 100


def distributions(count: int, seed: int) -> NDArray[np.float64]:
    """log p [count, VOCABULARY], about as sharp as a language model's."""
    logits = np.random.default_rng(seed).normal(0, 3, size=(count, VOCABULARY))
    found: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return found


def drawn(log_p: NDArray[np.float64], seed: int) -> NDArray[np.int64]:
    noise = np.random.default_rng(seed).gumbel(size=log_p.shape)
    found: NDArray[np.int64] = (log_p + noise).argmax(axis=1)
    return found


def test_every_factor_has_a_mean_of_one_less_the_room_for_rounding() -> None:
    log_p = distributions(1, 0)
    every = np.arange(VOCABULARY)
    factors = np.exp(token_log_factors(np.repeat(log_p, VOCABULARY, axis=0), every))
    assert np.allclose(np.exp(log_p[0]) @ factors, np.exp(-0.02 * np.abs(TILTS)))


def test_the_mean_under_a_kernel_is_that_of_the_tokens_which_it_draws() -> None:
    """Also where one excludes a token that the other may draw."""
    log_p, of_kernel = distributions(1, 0), distributions(1, 1)
    log_p[0, 7], of_kernel[0, 9] = -np.inf, -np.inf
    factors = token_log_factors(np.repeat(log_p, VOCABULARY, axis=0), np.arange(VOCABULARY))
    room = 0.02 * np.abs(TILTS) * np.isfinite(log_p[0])[:, np.newaxis]
    means = np.exp(of_kernel[0]) @ np.exp(factors + room)
    assert np.allclose(kernel_log_means(log_p, of_kernel), np.log(means))


def test_how_far_a_kernel_moves_the_two_largest_logits_apart() -> None:
    logits = np.array([[1.0, 3.0, 2.0], [5.0, 0.0, 4.5]])
    moved = np.array([[9.0, 3.5, 1.75], [5.25, 0.0, 4.75]])
    assert moved_apart(logits, moved).tolist() == [0.75, 0.0]


def log_evidence(log_p: NDArray[np.float64], tokens: NDArray[np.int64]) -> float:
    return float(log_path(token_log_factors(log_p, tokens))[-1])


def test_an_honest_answer_is_not_convicted() -> None:
    for seed in range(200):
        log_p = distributions(100, seed)
        assert log_evidence(log_p, drawn(log_p, 1000 + seed)) < math.log(1e3)


def test_another_model_s_tokens_convict() -> None:
    log_p = distributions(100, 0)
    assert log_evidence(log_p, drawn(distributions(100, 1), 2)) > math.log(1e6)


def test_tokens_that_are_always_the_likeliest_convict_too() -> None:
    # Greedy, where the receipt claims a temperature of 1.
    log_p = np.concatenate([distributions(100, seed) for seed in range(4)])
    assert log_evidence(log_p, log_p.argmax(axis=1)) > math.log(1e6)


def test_a_token_that_the_sampling_excludes_says_nothing_here() -> None:
    log_p = distributions(3, 0)
    log_p[1, 7] = -np.inf
    factors = token_log_factors(log_p, np.array([1, 7, 1]))
    assert not factors[1].any()
    assert np.isfinite(factors).all()
    assert factors[0].any()


@pytest.mark.parametrize("rough", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("sharper", [0.8, 1.0, 1.2])
def test_a_greedy_bet_never_pays_an_honest_server(rough: float, sharper: float) -> None:
    """Up to twice as rough as our own run, and whether or not the writer's logits are sharper."""
    draw, noise = np.random.default_rng(0), 0.06
    logits = draw.normal(0, 0.5, (20_000, 40))
    writer = sharper * logits + draw.normal(0, noise, logits.shape)
    # Two logits move apart by the root of two times what each moves.
    served = logits + draw.normal(0, rough * noise / math.sqrt(2), logits.shape)
    bets = greedy_log_bets(logits, writer, noise)
    rows = np.arange(len(logits))
    assert bets[rows, served.argmax(axis=1)].sum() < 0.0
    assert np.exp(bets[rows, served.argmax(axis=1)]).mean() < 1.0
    assert bets[rows, (writer + served - logits).argmax(axis=1)].sum() > 0.0 or sharper != 1.0


SHARES = (0.5, 0.1, 0.02)


def test_what_is_rare_convicts_where_it_is_not() -> None:
    beyond = np.random.default_rng(0).random(64) < 0.12
    assert log_path(rare_factors(beyond, 0.001, SHARES))[-1] > math.log(1e6)
    honest = np.arange(4000) % 1000 == 0
    assert log_path(rare_factors(honest, 0.001, SHARES))[-1] < math.log(100)


@pytest.mark.parametrize("seed", range(20))
def test_evidence_is_small_at_the_honest_rate(seed: int) -> None:
    happened = np.random.default_rng(seed).random(10_000) < 0.001
    assert log_path(rare_factors(happened, 0.001, SHARES))[-1] < math.log(1e3)


def test_a_greedy_gap_is_zero_for_the_largest_logit() -> None:
    logits = np.array([[1.0, 3.0, 2.0], [5.0, 0.0, 4.5]])
    assert greedy_gap(logits, np.array([1, 2])).tolist() == [0.0, 0.5]


def test_who_begins_to_cheat_after_a_thousand_honest_answers_is_convicted_soon() -> None:
    evidence = RenewedEvidence(2)
    for _ in range(1000):
        evidence.add(np.array([-1.0, -0.3]))
    assert evidence.log < 0.0
    for _ in range(32 + 22):
        evidence.add(np.array([1.0, 0.3]))
    assert evidence.log > math.log(1e6)


def test_renewed_evidence_begins_at_1_and_seldom_grows_by_chance() -> None:
    assert RenewedEvidence(3).log == pytest.approx(0.0)
    draw, peaks = np.random.default_rng(0), []
    for _ in range(100):
        evidence, peak = RenewedEvidence(1), 0.0
        for step in draw.normal(-0.5, 1.0, 200):
            evidence.add(np.array([step]))
            peak = max(peak, evidence.log)
        peaks.append(peak)
    # By Ville's inequality at most one in ten, up to chance.
    assert np.mean(np.array(peaks) > math.log(10)) <= 0.15
