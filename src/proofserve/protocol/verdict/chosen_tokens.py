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

from proofserve.protocol.verdict.evidence import Evidence

# Above 0 a bet on tokens that are too unlikely, below 0 on tokens that are too likely. The small
# ones find a writer that is nearly as good as the model.
TILTS = (-0.4, -0.2, -0.1, -0.05, 0.05, 0.1, 0.2, 0.4)
# What a kernel may add to the mean of a factor, as a logarithm for each unit of tilt, beyond what
# the kernels add that are emulated: none of them is quite the server's.
_ROUNDING = 0.02
Floats = NDArray[np.float64]


def token_log_factors(log_p: Floats, tokens: NDArray[np.int64]) -> Floats:
    """What each token gives to every bet: float64 [n, len(TILTS)].

    ``log_p`` [n, vocabulary] are the logarithms of p, minus infinity where the sampling excludes
    a token, ``tokens`` [n] those of the answer. An excluded token gives 0: ``TokenEvidence`` is
    for tokens that can have been drawn.
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


class TokenEvidence(Evidence):
    """Evidence that the tokens of one answer after the other were not drawn from p.

    Nor from what any emulated kernel makes of p, where these are given.
    """

    def __init__(self) -> None:
        super().__init__(len(TILTS))

    def read(self, log_p: Floats, tokens: NDArray[np.int64], most: Floats | None = None) -> None:
        """One answer, or a part of one; shapes as of ``token_log_factors``.

        ``most`` [tilts] is the largest of 0 and what each kernel gives over this part, in sums of
        ``kernel_log_means``. The kernel that drew the tokens gave that much or less.
        """
        given = token_log_factors(log_p, tokens).sum(axis=0)
        self.add(given if most is None else given - most)


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
