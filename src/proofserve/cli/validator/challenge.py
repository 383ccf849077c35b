"""``proofserve challenge``: has a node compute what it cannot have computed before."""

import math
import time
from dataclasses import replace
from typing import Annotated, Final

import typer
from pydantic import Field

from proofserve.cli.command import ApiKey, verdict_command
from proofserve.cli.recompute import tell_plan_of_verdict, warn_of_few_values
from proofserve.cli.session import COLOURS, CommandSession, worst_exit_code
from proofserve.cli.validator.options import (
    CalibrationOptions,
    PlanOptions,
    ProofChanceOptions,
    RecomputationOptions,
    ReportOptions,
    WitnessOptions,
    needed_without_plan,
)
from proofserve.client.judging import ClaimsJudge, challenged
from proofserve.remote.node_client import Transcript
from proofserve.remote.records import Work
from proofserve.reports import Progress, ReportedError
from proofserve.verifier import challenge
from proofserve.verifier.bundle import HeardNode, write_bundle
from proofserve.verifier.calibration_file import calibrated_order
from proofserve.verifier.judging import JudgingOptions
from proofserve.verifier.nodes.judging import TrustedNodes

app = typer.Typer()

# By a sketch honest nodes of real models were cleared after 23 to 36 in the median, and within
# these in 99 of 100; artifact-v1 takes more. Forging less shows when challenges repeat.
NONCES: Final = 100
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(text: str) -> float:
    """Seconds of a time such as 90, 90s, 10m or 2h. Raises typer.BadParameter."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _SECONDS else (text, "s")
    try:
        seconds = float(number) * _SECONDS[unit]
    except ValueError:
        seconds = math.nan
    if not 1.0 <= seconds < math.inf:
        raise typer.BadParameter(f"{text!r} is no time of a second or more, as 90s, 10m or 2h are")
    return seconds


class ChallengeOptions(
    WitnessOptions,
    RecomputationOptions,
    CalibrationOptions,
    ProofChanceOptions,
    ReportOptions,
    PlanOptions,
):
    url: Annotated[str | None, typer.Argument(callback=needed_without_plan)] = None
    """The node, or a fleet. --plan needs none."""
    nonces: int = Field(NONCES, ge=1, le=10**6)
    """How many to ask for at a time."""
    deadline: float = Field(60.0, ge=0.1)
    """Seconds within which the whole answer must come."""
    every: Annotated[float | None, typer.Option(parser=seconds_of, metavar="TIME")] = None
    """Challenge again and again until Ctrl-C, so far apart: 90s, 10m, 2h."""
    api_key: ApiKey = None


@verdict_command(app, "challenge")
def challenge_node(given: ChallengeOptions, session: CommandSession) -> int:
    """Have a node compute nonces of a block that was drawn just now, and judge it.

    Block and nonces are random and new each time: the node can neither have
    computed them before, nor choose which ones it computes honestly. A node with
    keys computes them for a validator's key, or an operator's (POC_API_KEY).
    Verdict and exit codes are those of `verify`: 0 honest, 1 fraud, 2 undecided or
    unproved, 3 no verdict.

    A node that answers late, partly, for another block or with an error is
    unproved: it may serve chat, or run a round, for whose end a challenge waits.
    Under --every these are counted, so that a node that never answers shows.
    The exit code is then that of the worst challenge: 1, else 3, else 2, else 0.

    --alpha is for the challenges of 24 hours together: under --every each has an
    equal part of it, and each line says what is left.

    With --reference, twice or more, other nodes compute the same nonces, in the place
    of --model: see `verify --help`.

    An answer in time shows that some node computed it with this model just now:
    this one may have asked another. Choose --deadline by the seconds that each
    verdict names, for example three times those of an honest node.

    \b
    proofserve challenge --plan --model ./model
    proofserve challenge http://node:8000 --model ./model --calibration calibration.json
    proofserve challenge http://node:8000 --model ./model --calibration calibration.json
        --every 10m --deadline 20 --json challenges.json
    proofserve challenge http://node:8000 --reference http://mine:8000
        --reference http://yours:8000 --reference http://theirs:8000
    """
    tally = challenge.Tally(str(given.url), given.alpha, given.every)
    chances, measured = (tally.alpha_of_one, given.beta, given.share), given.measured()
    numbers = JudgingOptions((), *chances, threshold=measured)
    order, nodes = calibrated_order(measured), given.nodes({given.url})
    judging = given.judging(given.model, nodes, numbers)
    if given.plan or nodes is None or given.model is not None:
        if given.model is None:
            raise ReportedError("give --model CHECKPOINT, or --reference NODE twice or more")
        warn_of_few_values(order, session)
        if given.plan:
            tell_plan_of_verdict(judging, order, given.nonces, {}, session)
            return 0
    judge = judging.judge_of(order, session.line)
    try:
        _challenge(given, order, judge, nodes, tally, session)
    except SystemExit:
        # A signal ends a repeated challenge, and what it has found counts.
        if given.every is None or not tally.newest:
            raise
    if given.every is not None:
        session.tell(tally.text)
    given.write(tally.record())
    # Not returned: the signal that ended it would be its exit code.
    raise typer.Exit(worst_exit_code(tally.counts))


def _challenge(
    given: ChallengeOptions,
    order: Work,
    judge: ClaimsJudge,
    nodes: TrustedNodes | None,
    tally: challenge.Tally,
    session: CommandSession,
) -> None:
    """Challenge once, or until a signal, and add what is found to ``tally``."""
    while True:
        began = time.monotonic()
        result = _once(given, order, judge, nodes, session.line)
        tally.add(result, time.monotonic())
        if given.every is None and result.report is not None:
            session.show(result.outcome, result.report.lines())
        left = f"; {tally.alpha_left}" if tally.alpha_left else ""
        session.tell(f"{result.line}{left}", COLOURS[result.outcome])
        if given.every is None:
            return
        given.write(tally.record())
        session.line.rest(f"{tally.text}; the next one is due after {given.every:g} s")
        time.sleep(max(0.0, began + given.every - time.monotonic()))


def _once(
    given: ChallengeOptions,
    order: Work,
    judge: ClaimsJudge,
    nodes: TrustedNodes | None,
    progress: Progress,
) -> challenge.ChallengeResult:
    """One challenge. Raises the errors of our own recomputation."""
    asked, heard, url = challenge.fresh(order, given.nonces), Transcript(), str(given.url)
    progress.step(f"waiting for {given.nonces} nonces, at most {given.deadline:g} s")
    result = challenged((url, given.api_key), asked, given.deadline, judge, heard)
    if result.report is None:
        return result
    node, judged_with = HeardNode(url, heard, challenge=asked), (given.calibration, given.suspect)
    unwritten = write_bundle(given.bundle, node, result.report, None, judged_with, nodes)
    return replace(result, reason=f"{result.reason}; {unwritten}") if unwritten else result
