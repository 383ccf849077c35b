"""What it takes to convict a node that mismatches at a given rate."""

from dataclasses import dataclass

from proofserve.protocol.sequential import SequentialTest
from proofserve.protocol.statistics import (
    check_inside,
    convicting_count,
    power,
    rate_interval,
    sample_size,
)

# Rates of fraud that a sequential test may be set to, from the quickest test to the most patient.
# The first is the default of ``proofserve verify``.
P_FRAUDS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
# How much longer than the most nonces one looks, to tell how many would do.
FURTHER = (2, 5, 10, 20)
# Halvings of an interval within [0, 1]; a rate is wanted to a few digits.
_HALVINGS = 30


@dataclass(frozen=True, slots=True)
class ConvictionRule:
    """When a vector mismatches, and when a node that mismatches too often is convicted.

    A vector further than ``dist_threshold`` (L2) from the recomputed one is a mismatch, which an
    honest node has at most ``p_mismatch`` of the time. An honest node may be convicted with a
    chance of ``alpha``; a cheat shall be with a chance of ``power``, within ``max_nonces``. Raises
    ProtocolError for a rate or chance that is not between 0 and 1.
    """

    dist_threshold: float
    p_mismatch: float = 0.001
    alpha: float = 1e-6
    power: float = 0.999
    max_nonces: int = 1000

    def __post_init__(self) -> None:
        for field in ("p_mismatch", "alpha", "power"):
            check_inside(field, getattr(self, field))


@dataclass(frozen=True, slots=True)
class Sequential:
    """A sequential test that convicts: its setting, and the nonces it looks at.

    After ``nonces`` it has convicted with the wanted chance; ``expected`` is how many it takes on
    average.
    """

    p_fraud: float
    nonces: int
    expected: float


@dataclass(frozen=True, slots=True)
class Conviction:
    """What convicts a node of one rate of mismatches.

    ``fixed`` is the number of nonces of the fixed test and ``sequential`` the quickest setting of
    the sequential one, each None if ``max_nonces`` are not enough. ``default_convicts`` is the
    chance that the sequential test of the default setting convicts.
    """

    fixed: int | None
    sequential: Sequential | None
    default_convicts: float


class PowerAnalysis:
    """Judges rates by one rule, each rate once."""

    def __init__(self, rule: ConvictionRule) -> None:
        self.rule = rule
        self._known: dict[float, Conviction] = {}
        self._sizes = _strongest_sizes(rule)
        self.least_rate = self._least_rate()

    def conviction(self, rate: float) -> Conviction:
        """What convicts a node that mismatches at ``rate``."""
        if rate not in self._known:
            default, sequential = self._sequential(rate)
            self._known[rate] = Conviction(self._fixed(rate), sequential, default)
        return self._known[rate]

    def nonces_beyond(self, rate: float) -> int | None:
        """How many nonces, more than ``max_nonces``, would convict at ``rate``; a round number.

        None if not even many times more do.
        """
        sizes = (times * self.rule.max_nonces for times in FURTHER)
        return next((n for n in sizes if self._convicts(n, rate)), None)

    def mismatches_needed(self, trials: int) -> int | None:
        """The fewest mismatches among ``trials`` that show a rate which is convicted.

        That is one whose interval lies above ``least_rate``. None if not even all are enough.
        """
        least = self.least_rate
        if least is None:
            return None
        counts = range(1, trials + 1)
        return next((k for k in counts if rate_interval(k, trials)[0] >= least), None)

    def _least_rate(self) -> float | None:
        """The lowest rate of mismatches that ``max_nonces`` or fewer convict; None if none is."""
        if not self._some_size_convicts(1.0):
            return None
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            if self._some_size_convicts(middle):
                high = middle
            else:
                low = middle
        return high

    def _some_size_convicts(self, rate: float) -> bool:
        return any(self._convicts(n, rate) for n in self._sizes)

    def _convicts(self, nonces: int, rate: float) -> bool:
        rule = self.rule
        return power(nonces, rule.p_mismatch, rule.alpha, rate) >= rule.power

    def _fixed(self, rate: float) -> int | None:
        rule = self.rule
        if self.least_rate is None or rate < self.least_rate:
            return None
        return sample_size(rule.p_mismatch, rule.alpha, rate, rule.power, rule.max_nonces)

    def _sequential(self, rate: float) -> tuple[float, Sequential | None]:
        """The chance that the default setting convicts, and the quickest setting that does."""
        rule = self.rule
        default = 0.0
        for p_fraud in P_FRAUDS:
            if p_fraud <= rule.p_mismatch:
                break
            test = SequentialTest(rule.p_mismatch, p_fraud, rule.alpha, 1.0 - rule.power)
            course = test.course(rate, rule.max_nonces)
            if p_fraud == P_FRAUDS[0]:
                default = course.convicted
            nonces = course.nonces_to_convict(rule.power)
            if nonces is not None:
                return default, Sequential(p_fraud, nonces, course.expected_nonces)
            if rate <= rule.p_mismatch:
                # No setting may convict an honest node.
                break
        return default, None


def _strongest_sizes(rule: ConvictionRule) -> tuple[int, ...]:
    """The numbers of nonces up to ``max_nonces`` of which one is the most powerful.

    Power is a saw-tooth: it falls where one more mismatch becomes necessary. So it is greatest at
    the end, or just before it fell for the last time.
    """

    def needed(n: int) -> int | None:
        return convicting_count(n, rule.p_mismatch, rule.alpha)

    most = rule.max_nonces
    before = next((n for n in range(most, 0, -1) if needed(n) != needed(most)), most)
    return most, before
