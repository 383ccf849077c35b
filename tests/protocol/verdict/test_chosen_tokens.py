import math

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.protocol.verdict.chosen_tokens import (
    TILTS,
    TokenEvidence,
    greedy_gap,
    kernel_log_means,
    moved_apart,
    token_log_factors,
)
from proofserve.protocol.verdict.evidence import RareEvidence

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


def test_an_honest_answer_is_not_convicted() -> None:
    for seed in range(200):
        evidence, log_p = TokenEvidence(), distributions(100, seed)
        evidence.read(log_p, drawn(log_p, 1000 + seed))
        assert evidence.log < math.log(1e3)


def test_another_model_s_tokens_convict() -> None:
    evidence, log_p = TokenEvidence(), distributions(100, 0)
    evidence.read(log_p, drawn(distributions(100, 1), 2))
    assert evidence.log > math.log(1e6)


def test_tokens_that_are_always_the_likeliest_convict_too() -> None:
    # Greedy, where the receipt claims a temperature of 1.
    evidence = TokenEvidence()
    for seed in range(4):
        log_p = distributions(100, seed)
        evidence.read(log_p, log_p.argmax(axis=1))
    assert evidence.log > math.log(1e6)


def test_a_token_that_the_sampling_excludes_says_nothing_here() -> None:
    log_p = distributions(3, 0)
    log_p[1, 7] = -np.inf
    factors = token_log_factors(log_p, np.array([1, 7, 1]))
    assert not factors[1].any()
    assert np.isfinite(factors).all()
    assert factors[0].any()


SHARES = (0.5, 0.1, 0.02)


def test_what_is_rare_convicts_where_it_is_not() -> None:
    beyond = np.random.default_rng(0).random(64) < 0.12
    cheap, honest = RareEvidence(0.001, SHARES), RareEvidence(0.001, SHARES)
    cheap.add_cases(beyond)
    assert cheap.log > math.log(1e6)
    honest.add_cases(np.arange(4000) % 1000 == 0)
    assert honest.log < math.log(100)


@pytest.mark.parametrize("seed", range(20))
def test_evidence_is_small_at_the_honest_rate(seed: int) -> None:
    evidence = RareEvidence(0.001, SHARES)
    evidence.add_cases(np.random.default_rng(seed).random(10_000) < 0.001)
    assert evidence.log < math.log(1e3)


def test_a_greedy_gap_is_zero_for_the_largest_logit() -> None:
    logits = np.array([[1.0, 3.0, 2.0], [5.0, 0.0, 4.5]])
    assert greedy_gap(logits, np.array([1, 2])).tolist() == [0.0, 0.5]
