"""The token test: whether the tokens of an answer were drawn from the model's distribution.

Sketches show that the model read an answer. A cheap model may have written it, and the real one
read it once. With p the real model's distribution of a token x, p(x)^-lam over the sum of
p(y)^(1 - lam) has a mean of 1 if x was drawn from p, whatever came before: the product over an
answer is a martingale (``docs/receipts.md``).

An honest server draws from its own kernel's distribution, not from p. The mean of each factor under
a kernel that is emulated on the same tokens is known, and taken off.
"""

import numpy as np
from numpy.typing import NDArray

# Above 0 a bet on tokens that are too unlikely, below 0 on tokens that are too likely. The small
# ones find a writer that is nearly as good as the model.
TILTS = (-0.4, -0.2, -0.1, -0.05, 0.05, 0.1, 0.2, 0.4)
# What a kernel may add to the mean of a factor, as a logarithm for each unit of tilt, beyond what
# the kernels add that are emulated: none of them is quite the server's.
_ROUNDING = 0.02
# Of one greedy token: it is never proof alone, and the likeliest never costs all.
_MOST_BET, _MOST_COST = 4.0, 1.0 - 1e-6
_SCALE = 1.5
# Logits that honest rounding does not move at all.
_LEAST_NOISE = 1e-6
Floats = NDArray[np.float64]


def token_log_factors(log_p: Floats, tokens: NDArray[np.int64]) -> Floats:
    """What each token gives to every bet: float64 [n, len(TILTS)].

    ``log_p`` [n, vocabulary] are the logarithms of p, minus infinity where the sampling excludes
    a token, ``tokens`` [n] those of the answer. An excluded token gives 0: the bets are for
    tokens that can have been drawn.
    """
    rows = np.arange(len(tokens))
    bets = [_log_bet(log_p, tilt)[rows, tokens] - _ROUNDING * abs(tilt) for tilt in TILTS]
    factors: Floats = np.stack(bets, axis=1)
    factors[np.isneginf(log_p[rows, tokens])] = 0.0
    return factors


def kernel_log_means(log_p: Floats, of_kernel: Floats) -> Floats:
    """The logarithm of the mean of every bet if a kernel draws the token: float64 [n, len(TILTS)].

    ``of_kernel`` [n, vocabulary] are the logarithms of its distribution, in the form of ``log_p``.
    """
    means = [np.exp(of_kernel + _log_bet(log_p, tilt)).sum(axis=1) for tilt in TILTS]
    logs: Floats = np.log(np.stack(means, axis=1))
    return logs


def moved_apart(logits: Floats, of_kernel: Floats) -> Floats:
    """By how much a kernel moves the two largest logits of each token apart: float64 [n]."""
    rows = np.arange(len(logits))
    first, second = np.argpartition(-logits, 1, axis=1)[:, :2].T
    moved = of_kernel - logits
    apart: Floats = np.abs(moved[rows, first] - moved[rows, second])
    return apart


def greedy_gap(logits: Floats, tokens: NDArray[np.int64]) -> Floats:
    """How far each token's logit is below the largest: float64 [n], 0 for the greedy choice."""
    gaps: Floats = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
    return gaps


def greedy_log_bets(logits: Floats, of_writer: Floats, noise: float) -> Floats:
    """What each greedy token gives to a bet on a writer with other logits: [n, vocabulary].

    An honest server's rounding takes a token i that is g below the likeliest with a chance of at
    most p_i, by softmax(logits / (1.5 ``noise``)): ``noise`` is the root mean square by which our
    own honest rounding moves two logits apart, and normal errors up to 2.4 times as large stay
    below the logistic distribution of this scale. With q of the writer likewise, i gives
    b_i = min(q_i / p_i, e^4), and the likeliest token gives 1 - sum (b_i - 1)+ p_i over all others:
    whatever such a server takes, the mean is at most 1.
    """
    scale = _SCALE * max(noise, _LEAST_NOISE)
    scaled = logits / scale, of_writer / scale
    log_p, log_q = (each - _log_sum(each)[:, np.newaxis] for each in scaled)
    bets: Floats = np.minimum(log_q - log_p, _MOST_BET)
    rows, top = np.arange(len(logits)), logits.argmax(axis=1)
    more = np.maximum(np.expm1(bets), 0.0) * np.exp(log_p)
    more[rows, top] = 0.0
    bets[rows, top] = np.log1p(-np.minimum(more.sum(axis=1), _MOST_COST))
    return bets


def _log_bet(log_p: Floats, tilt: float) -> Floats:
    """What each token of the vocabulary would give to a bet, float64 [n, vocabulary]."""
    given: Floats = -tilt * log_p - _log_sum((1.0 - tilt) * log_p)[:, np.newaxis]
    given[np.isneginf(log_p)] = 0.0
    return given


def _log_sum(logs: Floats) -> Floats:
    """log of the sum of exp(``logs``) along the last axis; minus infinity counts as nothing."""
    highest = logs.max(axis=1)
    found: Floats = highest + np.log(np.exp(logs - highest[:, np.newaxis]).sum(axis=1))
    return found
