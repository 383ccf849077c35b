"""The tests of ``proofserve verify``: which ones the options ask for, made ready to judge."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from proofserve.lab.calibrate.calibration_file import (
    HOW_TO_CALIBRATE,
    CalibrationFile,
    MeasuredThreshold,
    Shape,
    measured_threshold,
)
from proofserve.lab.client.errors import LabError
from proofserve.lab.verify.counting import CountJudge, CountRule
from proofserve.lab.verify.direction import (
    CalibratedYardstick,
    DirectionJudge,
    EmulatedYardstick,
    KernelBank,
    Yardstick,
)
from proofserve.lab.verify.judges import Chances, Judge, PairedJudge, TwinJudge, default_share
from proofserve.protocol.verdict.sequential import SequentialTest
from proofserve.rounds.records import Workload

COUNT, PAIRED, DIRECTION, TWINS = TESTS = ("count", "paired", "direction", "twins")
# It needs an engine whose bits count, and runs before the others.
EXACT: Final = "exact"
# They can convict, so they share alpha; twins only say that no calibrated kernel explains a node.
CONVICTING: Final = frozenset({COUNT, PAIRED, DIRECTION})
# They need honest figures of the checkpoint.
OF_A_CALIBRATION: Final = frozenset({PAIRED, TWINS})


@dataclass(frozen=True, slots=True)
class ChosenTests:
    """Whether ``exact`` runs, and whether others do where it decides nothing.

    ``others`` are those that were named, empty for the default ones.
    """

    exact: bool
    others: tuple[str, ...]
    judges: bool


def chosen_tests(named: Sequence[str], *, has_engine: bool, has_figures: bool) -> ChosenTests:
    """The tests that are asked for, where by default all run that can.

    ``has_figures`` of honest nodes: a threshold or a calibration. Raises LabError for an unknown
    test, and unless exact has an engine.
    """
    if unknown := next((test for test in named if test not in (EXACT, *TESTS)), None):
        raise LabError(f"--test {unknown}: choose from {', '.join((EXACT, *TESTS))}")
    if EXACT in named and not has_engine:
        raise LabError("--test exact: give an engine, --recompute-url NODE or --engine vllm")
    exact = EXACT in named or (not named and has_engine)
    others = tuple(dict.fromkeys(test for test in named if test != EXACT))
    return ChosenTests(exact, others, bool(others) or (not named and (has_figures or not exact)))


def threshold_of(
    tests: Collection[str],
    dist_threshold: float | None,
    calibration: Path | None,
    p_mismatch: float | None,
) -> MeasuredThreshold | None:
    """What the options say of honest nodes; None if no test needs it and nothing is given."""
    if {*tests} == {DIRECTION} and not calibration and dist_threshold is None:
        return None
    return measured_threshold(dist_threshold, calibration, p_mismatch)


@dataclass(frozen=True, slots=True)
class JudgingOptions:
    """``tests`` is empty for the default ones; ``alpha`` and ``beta`` are of the whole verdict.

    ``share`` of forged nonces is what a cleared node has not done, None for ``default_share``.
    """

    tests: tuple[str, ...]
    alpha: float
    beta: float
    share: float | None
    p_fraud: float
    sequential: bool
    threshold: MeasuredThreshold | None

    @property
    def calibration(self) -> CalibrationFile | None:
        return self.threshold.calibration if self.threshold else None

    @property
    def origin(self) -> str:
        return self.threshold.origin if self.threshold else "none; kernels were emulated instead"

    def chances(self, sample: int) -> Chances:
        """Raises ProtocolError for a number out of range."""
        share = default_share(sample) if self.share is None else self.share
        return Chances(self.alpha, self.beta, share)

    def require(
        self,
        work: Workload,
        models: Collection[str],
        shape: Shape | None,
        digest: str | None,
        is_dense: bool = False,
    ) -> None:
        """Raise LabError unless the honest figures hold for these artifacts."""
        if self.calibration is not None:
            self.calibration.require(work, models, shape, digest, is_dense)

    def count_rule(self) -> CountRule | None:
        """None if the verdict does not count. Raises ProtocolError for a number out of range."""
        counts = COUNT in self.tests or (not self.tests and self.calibration is None)
        if not counts or self.threshold is None:
            return None
        alpha = self.alpha / max(1, len(CONVICTING.intersection(self.tests)))
        test = SequentialTest(self.threshold.p_mismatch, self.p_fraud, alpha, self.beta)
        return CountRule(test, self.threshold.dist_threshold, self.sequential)


def judges_of(options: JudgingOptions, sample: int, validator: KernelBank | None) -> list[Judge]:
    """A judge for each test, which together convict an honest node with a chance of alpha at most.

    By default all that a calibration allows, and without a calibration the count. Raises LabError
    for a test that is unknown or cannot be run here, and ProtocolError for a number out of range.
    """
    tests = options.tests
    for test in tests:
        if test not in TESTS:
            raise LabError(f"--test {test}: choose from {', '.join(TESTS)}")
        if reason := _obstacle(test, options, validator):
            raise LabError(f"--test {test}: {reason}")
    if not tests and options.calibration is None:
        tests = (COUNT,)
    elif not tests:
        tests = tuple(
            test for test in (PAIRED, DIRECTION, TWINS) if not _obstacle(test, options, validator)
        )
        if not tests:
            raise LabError(f"--calibration: {_obstacle(PAIRED, options, validator)}")
    chances = options.chances(sample)
    shared = replace(chances, alpha=chances.alpha / max(1, len(CONVICTING.intersection(tests))))
    return [_judge(test, options, shared, sample, validator) for test in tests]


def _obstacle(test: str, options: JudgingOptions, validator: KernelBank | None) -> str:
    """Why this test cannot be run; empty if it can."""
    if test == COUNT:
        return ""
    if validator is None:
        return "it needs the checkpoint; give --model, or --dist-threshold for the count"
    if test in OF_A_CALIBRATION and options.calibration is None:
        return f"it needs a calibration; {HOW_TO_CALIBRATE}"
    if test == TWINS and options.calibration and not options.calibration.honest.has_twins:
        return "the nonces of this scheme are no twins; those of sketches are"
    return ""


def _judge(
    test: str, options: JudgingOptions, chances: Chances, sample: int, validator: KernelBank | None
) -> Judge:
    measured, rule = options.calibration, options.count_rule()
    if test == COUNT and rule is not None:
        return CountJudge(rule, sample)
    if validator is None:
        raise AssertionError(f"{test} has no obstacle, so it has what it needs")
    if measured is not None and test == PAIRED:
        return PairedJudge(validator.own_errors, measured.honest, chances)
    if measured is not None and test == TWINS:
        return TwinJudge(validator.own_errors, measured.honest, chances)
    yardstick: Yardstick = EmulatedYardstick(validator)
    # Suspects need not have been measured for the other tests.
    if measured is not None and measured.honest.shares.suspects:
        yardstick = CalibratedYardstick(validator, measured.honest)
    return DirectionJudge(validator, yardstick, chances)
