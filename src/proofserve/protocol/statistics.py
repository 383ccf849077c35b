"""From a count of mismatches to a verdict: the exact one-sided binomial test (A.4, B.4)."""

import math
from dataclasses import dataclass

from proofserve.protocol.errors import ProtocolError

# The chance that an honest node's distance is called invalid, fixed by the distance protocol.
DISTANCE_P_MISMATCH = 5e-4

# Terms below this share of the sum cannot change it any more.
_NEGLIGIBLE = 2.0**-60


@dataclass(frozen=True)
class Verdict:
    """How likely an honest node is to differ this often, and whether that is too unlikely."""

    p_value: float
    fraud_detected: bool


def judge(n_mismatch: int, n_total: int, p_mismatch: float, fraud_threshold: float) -> Verdict:
    """Fraud iff P(X >= n_mismatch) < fraud_threshold, X ~ Binomial(n_total, p_mismatch) (B.4).

    An empty comparison proves nothing and gives (1.0, False). Raises ProtocolError for a count or
    probability outside its range.
    """
    _check_probability("p_mismatch", p_mismatch)
    _check_probability("fraud_threshold", fraud_threshold)
    _check_counts("n_mismatch", n_mismatch, "n_total", n_total)
    p_value = binomial_tail(n_mismatch, n_total, p_mismatch)
    return Verdict(p_value, p_value < fraud_threshold)


def judge_distances(n_invalid: int, n_total: int, fraud_threshold: float) -> Verdict:
    """The rule of ValidatedBatch (A.4): as ``judge``, but an empty batch keeps a p_value of -1."""
    verdict = judge(n_invalid, n_total, DISTANCE_P_MISMATCH, fraud_threshold)
    return verdict if n_total else Verdict(-1.0, False)


def binomial_tail(k: int, n: int, p: float) -> float:
    """P(X >= k) for X ~ Binomial(n, p), to 1e-9 relative for n up to 10^6.

    Raises ProtocolError unless 0 <= k <= n and 0 <= p <= 1.
    """
    _check_counts("k", k, "n", n)
    _check_probability("p", p)
    if k == 0:
        return 1.0
    if p in (0.0, 1.0):
        return p
    odds = p / (1.0 - p)
    if k > n * p:
        return _mass(k, n, p) * _relative_tail(k, n, odds)
    # The lower tail is the smaller one here: the upper tail of the n - X that did not happen.
    return 1.0 - _mass(k - 1, n, p) * _relative_tail(n - k + 1, n, 1.0 / odds)


def _mass(k: int, n: int, p: float) -> float:
    """P(X = k). A log-gamma would lose 1e-9 at n = 10^6; summing its factors' logs does not."""
    choose = (math.log((n - i) / (i + 1)) for i in range(min(k, n - k)))
    return math.exp(math.fsum((*choose, k * math.log(p), (n - k) * math.log1p(-p))))


def _relative_tail(k: int, n: int, odds: float) -> float:
    """P(X >= k) / P(X = k) for a ``k`` beyond the mean, where the terms only fall."""
    total = term = 1.0
    for j in range(k, n):
        term *= (n - j) / (j + 1) * odds
        total += term
        if term < total * _NEGLIGIBLE:
            break
    return total


def _check_probability(field: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ProtocolError(field, f"{value} is not a probability")


def _check_counts(field: str, part: int, whole_field: str, whole: int) -> None:
    if whole < 0:
        raise ProtocolError(whole_field, f"{whole} is negative")
    if not 0 <= part <= whole:
        raise ProtocolError(field, f"{part} is outside 0..{whole}")
