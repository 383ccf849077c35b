"""From a count of mismatches to a verdict: the exact one-sided binomial test (A.4, B.4).

``sequential`` has the test that stops as soon as it is certain.
"""

from bisect import bisect_left
from dataclasses import dataclass

from scipy import special

from proofserve.protocol.errors import ProtocolError

# The chance that an honest node's distance is called invalid, fixed by the distance protocol.
DISTANCE_P_MISMATCH = 5e-4


@dataclass(frozen=True)
class BinomialVerdict:
    """The p-value of a count of mismatches for an honest node, and whether it means fraud."""

    p_value: float
    fraud_detected: bool


def judge(
    n_mismatch: int, n_total: int, p_mismatch: float, fraud_threshold: float
) -> BinomialVerdict:
    """Fraud iff P(X >= n_mismatch) < fraud_threshold, X ~ Binomial(n_total, p_mismatch) (B.4).

    An empty comparison proves nothing and gives (1.0, False). Raises ProtocolError for a count or
    probability outside its range.
    """
    _check_probability("p_mismatch", p_mismatch)
    _check_probability("fraud_threshold", fraud_threshold)
    _check_counts("n_mismatch", n_mismatch, "n_total", n_total)
    p_value = binomial_tail(n_mismatch, n_total, p_mismatch)
    return BinomialVerdict(p_value, p_value < fraud_threshold)


def judge_distances(n_invalid: int, n_total: int, fraud_threshold: float) -> BinomialVerdict:
    """The rule of ValidatedBatch (A.4): as ``judge``, but an empty batch keeps a p_value of -1."""
    verdict = judge(n_invalid, n_total, DISTANCE_P_MISMATCH, fraud_threshold)
    return verdict if n_total else BinomialVerdict(-1.0, False)


def binomial_tail(k: int, n: int, p: float) -> float:
    """P(X >= k) for X ~ Binomial(n, p), to 1e-9 relative for n up to 10^6.

    Raises ProtocolError unless 0 <= k <= n and 0 <= p <= 1.
    """
    _check_counts("k", k, "n", n)
    _check_probability("p", p)
    # The regularized incomplete beta function.
    return 1.0 if k == 0 else float(special.betainc(k, n - k + 1, p))


def rate_interval(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The Clopper-Pearson interval of the rate of an event, seen in ``k`` of ``n`` trials.

    With a = 1 - ``confidence`` the lower end solves P(X >= k | p) = a/2, the upper end
    P(X <= k | p) = a/2, X ~ Binomial(n, p); at k = 0 and k = n an end is 0 or 1. It covers the true
    rate with at least ``confidence`` (C. Clopper and E. Pearson, Biometrika 26, 1934). Raises
    ProtocolError unless 0 <= k <= n, n >= 1 and 0 < confidence < 1.
    """
    _check_counts("k", k, "n", n)
    if n == 0:
        raise ProtocolError("n", "a rate needs at least one trial")
    check_inside("confidence", confidence)
    tail = (1.0 - confidence) / 2.0
    low = 0.0 if k == 0 else float(special.betaincinv(k, n - k + 1, tail))
    high = 1.0 if k == n else float(special.betainccinv(k + 1, n - k, tail))
    return low, high


def convicting_count(n: int, p_mismatch: float, fraud_threshold: float) -> int | None:
    """The fewest mismatches among ``n`` nonces that ``judge`` calls fraud, None if none is enough.

    Raises ProtocolError as ``judge``.
    """
    _check_counts("n", n, "n", n)
    _check_probability("fraud_threshold", fraud_threshold)
    if not binomial_tail(n, n, p_mismatch) < fraud_threshold:
        return None
    # The tail only falls with the count.
    return bisect_left(
        range(n), True, key=lambda count: binomial_tail(count, n, p_mismatch) < fraud_threshold
    )


def power(n: int, p_mismatch: float, fraud_threshold: float, rate: float) -> float:
    """The chance that ``judge`` convicts, on ``n`` nonces, a node that mismatches at ``rate``.

    P(X >= c) for X ~ Binomial(n, rate) and c = ``convicting_count``; 0 where there is none. Raises
    ProtocolError as ``judge``, and for a ``rate`` that is no probability.
    """
    _check_probability("rate", rate)
    needed = convicting_count(n, p_mismatch, fraud_threshold)
    return 0.0 if needed is None else binomial_tail(needed, n, rate)


def sample_size(
    p_mismatch: float, fraud_threshold: float, rate: float, wanted: float, most: int
) -> int | None:
    """The fewest nonces, up to ``most``, whose ``power`` against ``rate`` is ``wanted`` or more.

    None if ``most`` are not enough. Power can fall a little from one number of nonces to the next,
    so a few more nonces may not be enough. Raises ProtocolError as ``power``.
    """
    _check_probability("wanted", wanted)
    sizes = range(1, most + 1)
    return next((n for n in sizes if power(n, p_mismatch, fraud_threshold, rate) >= wanted), None)


def check_inside(field: str, value: float) -> None:
    """Raise ProtocolError unless ``value`` is a probability that is neither 0 nor 1."""
    if not 0.0 < value < 1.0:
        raise ProtocolError(field, f"{value} is not between 0 and 1")


def _check_probability(field: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ProtocolError(field, f"{value} is not a probability")


def _check_counts(field: str, part: int, whole_field: str, whole: int) -> None:
    if whole < 0:
        raise ProtocolError(whole_field, f"{whole} is negative")
    if not 0 <= part <= whole:
        raise ProtocolError(field, f"{part} is outside 0..{whole}")
