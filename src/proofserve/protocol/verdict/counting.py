"""From a count of mismatches to a verdict: the exact one-sided binomial test (A.4, B.4).

``SequentialTest`` takes one nonce after the other and stops as soon as it is certain. It is Wald's
sequential probability ratio test (A. Wald, Sequential Analysis, 1947) of two rates of mismatches:
``p_honest`` and ``p_fraud``. After m mismatches among n nonces the log likelihood ratio is

    m log(p_fraud / p_honest) + (n - m) log((1 - p_fraud) / (1 - p_honest)).

At log(1/alpha) or more it convicts, at log(beta) or less it clears. An honest ratio is a martingale
of mean 1, so that by Ville's inequality the chance of convicting an honest node is at most alpha;
its inverse gives beta for the other error.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy import special

from proofserve.protocol.errors import ProtocolError

# The chance that an honest node's distance is called invalid, fixed by the distance protocol.
DISTANCE_P_MISMATCH = 5e-4
# Rounding of a logarithm must not miss a boundary that is met exactly.
_SLACK = 1e-9
# Smaller results of ``betainc`` lose digits, all of them from 1e-260 on where k is near n.
_LEAST_BETAINC = 1e-230


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
    """P(X >= k) for X ~ Binomial(n, p), to 1e-8 relative for n up to 10^6.

    Raises ProtocolError unless 0 <= k <= n and 0 <= p <= 1.
    """
    _check_counts("k", k, "n", n)
    _check_probability("p", p)
    if k == 0:
        return 1.0
    # The regularized incomplete beta function.
    tail = float(special.betainc(k, n - k + 1, p))
    return tail if tail > _LEAST_BETAINC else float(special.bdtrc(k - 1, n, p))


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


class SequentialResult(StrEnum):
    HONEST = "honest"
    FRAUD = "fraud"
    # There were too few nonces.
    UNDECIDED = "undecided"
    # The prover owed something that it did not show. It is neither cleared nor convicted.
    UNPROVED = "unproved"
    # The errors are like those of no known honest kernel, and like no known fraud either.
    UNEXPLAINED = "no verdict"


@dataclass(frozen=True)
class SequentialTest:
    """The two rates of mismatches and the largest chances of the two errors.

    ``alpha`` bounds the chance that a node with a rate of ``p_honest`` or less is convicted,
    ``beta`` the chance that a node with ``p_fraud`` or more is cleared. For a node between the two
    rates either result is possible. Raises ProtocolError for a rate or chance that is not between
    0 and 1, and unless ``p_honest`` is below ``p_fraud``.
    """

    p_honest: float
    p_fraud: float
    alpha: float = 1e-6
    beta: float = 1e-3

    def __post_init__(self) -> None:
        for field in ("p_honest", "p_fraud", "alpha", "beta"):
            check_inside(field, getattr(self, field))
        if not self.p_honest < self.p_fraud:
            known = f"the honest rate {self.p_honest}"
            raise ProtocolError("p_fraud", f"{self.p_fraud} is not above {known}")

    @property
    def convicts_at(self) -> float:
        return -math.log(self.alpha)

    @property
    def clears_at(self) -> float:
        return math.log(self.beta)

    def log_ratio(self, n_mismatch: int, n_total: int) -> float:
        """The log likelihood ratio of ``n_mismatch`` among ``n_total``.

        Raises ProtocolError unless 0 <= n_mismatch <= n_total.
        """
        if not 0 <= n_mismatch <= n_total:
            raise ProtocolError("n_mismatch", f"{n_mismatch} is outside 0..{n_total}")
        matches = n_total - n_mismatch
        return n_mismatch * self._mismatch + matches * self._match

    def result(self, n_mismatch: int, n_total: int) -> SequentialResult:
        """The result for ``n_mismatch`` among ``n_total`` nonces. Raises as ``log_ratio``."""
        ratio = self.log_ratio(n_mismatch, n_total)
        if ratio >= self.convicts_at - _SLACK:
            return SequentialResult.FRAUD
        if ratio <= self.clears_at + _SLACK:
            return SequentialResult.HONEST
        return SequentialResult.UNDECIDED

    def course(self, rate: float, most: int) -> "Course":
        """When the test ends for a node that mismatches at ``rate``, within ``most`` nonces.

        Exact: it computes the chance of every undecided count of mismatches, nonce by nonce.
        Raises ProtocolError unless ``rate`` is a probability and ``most`` at least 1.
        """
        if not 0.0 <= rate <= 1.0:
            raise ProtocolError("rate", f"{rate} is not a probability")
        if most < 1:
            raise ProtocolError("most", f"{most} is below 1")
        convicted, cleared = np.zeros(most), np.zeros(most)
        open_counts = np.ones(1)
        for n in range(1, most + 1):
            counts = np.zeros(n + 1)
            counts[:-1] = open_counts * (1.0 - rate)
            counts[1:] += open_counts * rate
            mismatches = np.arange(n + 1)
            ratios = mismatches * self._mismatch + (n - mismatches) * self._match
            fraud = ratios >= self.convicts_at - _SLACK
            honest = ratios <= self.clears_at + _SLACK
            convicted[n - 1] = counts[fraud].sum()
            cleared[n - 1] = counts[honest].sum()
            open_counts = np.where(fraud | honest, 0.0, counts)
        return Course(convicted, cleared)

    @property
    def _mismatch(self) -> float:
        return math.log(self.p_fraud / self.p_honest)

    @property
    def _match(self) -> float:
        return math.log1p(-self.p_fraud) - math.log1p(-self.p_honest)


@dataclass(frozen=True)
class Course:
    """The chances that a test ends at the 1st, 2nd, ... nonce: float64 [most] each."""

    convicted_at: NDArray[np.float64]
    cleared_at: NDArray[np.float64]

    @property
    def convicted(self) -> float:
        return float(self.convicted_at.sum())

    @property
    def cleared(self) -> float:
        return float(self.cleared_at.sum())

    @property
    def undecided(self) -> float:
        return max(0.0, 1.0 - self.convicted - self.cleared)

    @property
    def expected_nonces(self) -> float:
        """The mean number of nonces used; an undecided test uses all of them."""
        ended = self.convicted_at + self.cleared_at
        numbers = np.arange(1, len(ended) + 1)
        return float(ended @ numbers) + self.undecided * len(ended)

    def nonces_to_convict(self, power: float) -> int | None:
        """The number of nonces after which it has convicted with a chance of ``power``, or None.

        Raises ProtocolError unless 0 < power < 1.
        """
        check_inside("power", power)
        reached = np.flatnonzero(np.cumsum(self.convicted_at) >= power - _SLACK)
        return int(reached[0]) + 1 if len(reached) else None


def share_of_alpha(spent: float, judged: int, planned: int) -> float:
    """The share of a node's next verdict in a period's chance to convict an honest node.

    A period is any 24 hours, or any 365 days. Each verdict gets its share when its job is stored,
    before anything of its outcome is known: (1 - spent) / (n + 2). ``spent`` is the sum of the
    node's shares in the period before, and n the number of them (``judged``) or, if greater, how
    many are ``planned`` for a period. ADR 38 says why not by another rule.

    * No period holds shares of more than 1: the newest share in it is less than 1 - spent. The
      chance that one of its verdicts convicts an honest node is at most the sum of their alphas,
      however outcomes and samples depend on each other.
    * There is always something left: without a plan the k-th share is 1 / (k (k + 1)).
    * A steady n verdicts in a period get 1 / (2 n + 2) each.
    """
    return (1.0 - spent) / (max(judged, planned) + 2)
