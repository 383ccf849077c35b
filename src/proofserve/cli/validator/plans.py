"""What a validator's command will cost here; a configuration is enough, and nothing is written."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from proofserve.cli.session import CommandSession
from proofserve.reports import ReportedError
from proofserve.rounds.records import Workload
from proofserve.verifier.judging import JudgingOptions, references_on

if TYPE_CHECKING:
    from proofserve.verifier.plans import Pass
    from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup


def tell_plan(
    setup: "ValidatorSetup",
    work: Workload,
    forward_batch: int,
    passes_of: Callable[["CheckpointValidator"], Sequence["Pass"]],
    about: str,
    session: CommandSession,
) -> None:
    """Raises as ``plan_lines``."""
    # Loading torch takes seconds, and --help must not wait for it.
    from proofserve.verifier.plans import plan_lines  # noqa: PLC0415

    session.line.step("measuring how fast this machine is, for the plan")
    for line in plan_lines(setup, work, forward_batch, passes_of, about):
        session.tell(line)


def tell_plan_of_verdict(
    setup: "ValidatorSetup",
    work: Workload,
    options: JudgingOptions,
    about: tuple[int, Mapping[str, object]],
    forward_batch: int,
    session: CommandSession,
) -> None:
    """Of a verdict about up to so many nonces, and what their server says of itself.

    Raises ReportedError, and as ``plan_lines``.
    """
    from proofserve.verifier.plans import expected_passes  # noqa: PLC0415 - as above

    sample, ran_on = about
    if not sample:
        raise ReportedError("there is no artifact to verify")

    def passes_of(of: "CheckpointValidator") -> Sequence["Pass"]:
        at_once = of.at_once(forward_batch)
        references = references_on(ran_on, of.references, of.parallel)
        return expected_passes(options, sample, (of.names, references), at_once)

    what = f"of {sample} nonces until an honest node is cleared"
    tell_plan(setup, work, forward_batch, passes_of, what, session)
