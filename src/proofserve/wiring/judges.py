"""The tests of ``proofserve verify``: which ones the options ask for, made ready to judge."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proofserve.lab.calibrate.calibration_file import (
    HOW_TO_CALIBRATE,
    CalibrationFile,
    MeasuredThreshold,
    Shape,
    measured_threshold,
)
from proofserve.lab.client.errors import LabError
from proofserve.lab.verify.claimed import SKETCH
from proofserve.lab.verify.counting import CountJudge, CountRule
from proofserve.lab.verify.direction import DirectionJudge
from proofserve.lab.verify.judges import (
    Chances,
    Judge,
    PairedJudge,
    RankJudge,
    ScaleJudge,
    TwinJudge,
)
from proofserve.protocol.verdict.sequential import SequentialTest
from proofserve.rounds.records import Workload

if TYPE_CHECKING:
    from proofserve.wiring.validator import CheckpointValidator

COUNT, PAIRED, SCALE, RANK, DIRECTION, TWINS = TESTS = (
    "count",
    "paired",
    "scale",
    "rank",
    "direction",
    "twins",
)
# They compare with other vectors of a checkpoint, and need no honest distances.
NEED_NO_CALIBRATION: Final = frozenset({DIRECTION, TWINS})
OF_A_CHECKPOINT: Final = NEED_NO_CALIBRATION | {PAIRED}
# They compare with the validator's own rounding.
OF_OWN_ROUNDING: Final = frozenset({PAIRED, TWINS})


def threshold_of(
    tests: Collection[str],
    dist_threshold: float | None,
    calibration: Path | None,
    p_mismatch: float | None,
) -> MeasuredThreshold | None:
    """What the options say of honest distances; None if no test needs them and none are given."""
    if (
        tests
        and NEED_NO_CALIBRATION.issuperset(tests)
        and not calibration
        and dist_threshold is None
    ):
        return None
    return measured_threshold(dist_threshold, calibration, p_mismatch)


@dataclass(frozen=True, slots=True)
class JudgingOptions:
    """``tests`` is empty for the default ones; ``chances`` are those of the whole verdict."""

    tests: tuple[str, ...]
    chances: Chances
    p_fraud: float
    sequential: bool
    threshold: MeasuredThreshold | None

    @property
    def calibration(self) -> CalibrationFile | None:
        return self.threshold.calibration if self.threshold else None

    @property
    def origin(self) -> str:
        return self.threshold.origin if self.threshold else "none are needed"

    def require(self, work: Workload, models: Collection[str], shape: Shape | None) -> None:
        """Raise LabError unless the honest distances hold for these artifacts."""
        if self.threshold is not None:
            self.threshold.require(work, models, shape)

    def count_rule(self) -> CountRule | None:
        """None if the verdict does not count. Raises ProtocolError for a number out of range."""
        counts = COUNT in self.tests or (not self.tests and self.calibration is None)
        if not counts or self.threshold is None:
            return None
        # As all tests, the count gets its share of alpha.
        alpha = self.chances.alpha / max(1, len(self.tests))
        honest = self.threshold.p_mismatch
        test = SequentialTest(honest, self.p_fraud, alpha, self.chances.beta)
        return CountRule(test, self.threshold.dist_threshold, self.sequential)


def judges_of(
    options: JudgingOptions, scheme: str, sample: int, validator: "CheckpointValidator | None"
) -> list[Judge]:
    """A judge for each test, which together convict an honest node with a chance of alpha at most.

    By default all that a calibration and a checkpoint allow, and without a calibration the count.
    Raises LabError for a test that is unknown or cannot be run here, and ProtocolError for a number
    out of range.
    """
    tests = options.tests
    for test in tests:
        if test not in TESTS:
            raise LabError(f"--test {test}: choose from {', '.join(TESTS)}")
        if reason := _obstacle(test, options, scheme, validator):
            raise LabError(f"--test {test}: {reason}")
    if not tests:
        tests = _default_tests(options, scheme, validator)
    shared = replace(options.chances, alpha=options.chances.alpha / len(tests))
    return [_judge(test, options, shared, sample, validator) for test in tests]


def _default_tests(
    options: JudgingOptions, scheme: str, validator: "CheckpointValidator | None"
) -> tuple[str, ...]:
    if options.calibration is None:
        return (COUNT,)
    possible = {t for t in TESTS if not _obstacle(t, options, scheme, validator)}
    size = PAIRED if PAIRED in possible else SCALE
    return tuple(test for test in (size, DIRECTION, TWINS) if test in possible)


def _obstacle(
    test: str, options: JudgingOptions, scheme: str, validator: "CheckpointValidator | None"
) -> str:
    """Why this test cannot be run; empty if it can."""
    if test in {PAIRED, SCALE, RANK} and options.calibration is None:
        return f"it needs a calibration; {HOW_TO_CALIBRATE}"
    if test == PAIRED and options.calibration and options.calibration.paired is None:
        return "the ratios of this calibration tell no more than its distances; use --test scale"
    if test in OF_A_CHECKPOINT and validator is None:
        return "it needs the checkpoint; give --model"
    if test == TWINS and scheme != SKETCH:
        return f"{scheme} has no twins; {SKETCH} has"
    if test in OF_OWN_ROUNDING and validator is not None and validator.rounds_as_deployed:
        return "it needs a validator that rounds less than the node; give --dtype float32"
    return ""


def _judge(
    test: str,
    options: JudgingOptions,
    chances: Chances,
    sample: int,
    validator: "CheckpointValidator | None",
) -> Judge:
    measured, rule = options.calibration, options.count_rule()
    if test == COUNT and rule is not None:
        return CountJudge(rule, sample)
    if test == SCALE and measured is not None:
        return ScaleJudge(measured.fit.scale_fit, measured.carried(chances, measured.fit))
    if test == RANK and measured is not None:
        return RankJudge(measured.distances, chances)
    if validator is not None and test == TWINS:
        return TwinJudge(validator.own_errors, chances)
    if validator is not None and test == PAIRED and measured is not None and measured.paired:
        carried = measured.carried(chances, measured.paired)
        return PairedJudge(validator.own_errors, measured.paired.scale_fit, carried)
    if validator is None:
        raise AssertionError(f"{test} has no obstacle, so it has what it needs")
    expected, honest = measured.directions() if measured else ({}, {})
    return DirectionJudge(validator, expected, honest, chances)
