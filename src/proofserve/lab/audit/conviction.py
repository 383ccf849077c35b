"""How many nonces convict a node that mismatches at a given rate."""

from dataclasses import dataclass

from proofserve.protocol.verdict.counting import (
    check_inside,
    convicting_count,
    power,
    root,
    sample_size,
)
from proofserve.protocol.verdict.sequential import SequentialTest

# The settings of ``p_fraud`` that are tried, from the test with the fewest nonces to the one with
# the most. The first is the default of ``proofserve verify``.
P_FRAUDS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)


@dataclass(frozen=True, slots=True)
class ConvictionRule:
    """When a node is convicted.

    At most a share ``p_mismatch`` of an honest node's vectors are mismatches. ``alpha`` is the
    chance that an honest node is convicted, ``power`` the least chance with which ``max_nonces``
    have to convict a fraud. Raises ProtocolError for a rate or chance that is not between 0 and 1.
    """

    p_mismatch: float = 0.001
    alpha: float = 1e-6
    power: float = 0.999
    max_nonces: int = 1000

    def __post_init__(self) -> None:
        for field in ("p_mismatch", "alpha", "power"):
            check_inside(field, getattr(self, field))


@dataclass(frozen=True, slots=True)
class Sequential:
    """A sequential test that convicts: its setting, and how many nonces it needs.

    After ``nonces`` it has convicted with the wanted chance; on average it needs ``expected``.
    """

    p_fraud: float
    nonces: int
    expected: float


@dataclass(frozen=True, slots=True)
class Conviction:
    """The tests that convict a node with one rate of mismatches.

    ``fixed`` is the number of nonces of the fixed test, ``sequential`` the setting of the
    sequential test with the fewest nonces; each is None if ``max_nonces`` are not enough.
    ``default_convicts`` is the chance that the sequential test convicts at its default setting.
    """

    fixed: int | None
    sequential: Sequential | None
    default_convicts: float


class PowerAnalysis:
    def __init__(self, rule: ConvictionRule) -> None:
        self.rule = rule
        self._known: dict[float, Conviction] = {}
        self._sizes = _strongest_sizes(rule)
        self.least_rate = self._least_rate()

    def conviction(self, rate: float) -> Conviction:
        if rate not in self._known:
            default, sequential = self._sequential(rate)
            self._known[rate] = Conviction(self._fixed(rate), sequential, default)
        return self._known[rate]

    def _least_rate(self) -> float | None:
        if not self._some_size_convicts(1.0):
            return None
        return root(lambda rate: not self._some_size_convicts(rate))

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
        """The chance that the default setting convicts, and the first setting that does."""
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
                # An honest node's rate: no setting may convict it.
                break
        return default, None


def _strongest_sizes(rule: ConvictionRule) -> tuple[int, ...]:
    """Two numbers of nonces up to ``max_nonces``; one of them has the greatest power.

    Power falls where one more mismatch becomes necessary, and rises between. So it is greatest at
    ``max_nonces``, or just before it falls for the last time.
    """

    def needed(n: int) -> int | None:
        return convicting_count(n, rule.p_mismatch, rule.alpha)

    most = rule.max_nonces
    before = next((n for n in range(most, 0, -1) if needed(n) != needed(most)), most)
    return most, before
