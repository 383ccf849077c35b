"""``proofserve challenge``: has a node compute what it cannot have computed before."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from proofserve.cli import options
from proofserve.cli.session import EXIT_NO_VERDICT, CommandSession, VerdictCommand, open_session
from proofserve.cli.validator.by_nodes import given_nodes
from proofserve.cli.validator.plans import tell_plan_of_verdict
from proofserve.cli.validator.verify import COLOURS, EXIT_CODES, show
from proofserve.client.checkpoint import truths_of_checkpoint, validator_setup
from proofserve.protocol.nonces import fresh_seed
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.remote.node_client import BoundedClient, Transcript, UnprovedError
from proofserve.remote.records import Work
from proofserve.reports import Progress, ReportedError, write_json
from proofserve.verifier import challenge
from proofserve.verifier.bundle import HeardNode, write_bundle
from proofserve.verifier.calibration_file import calibrated_order, checkpoint_shape, read
from proofserve.verifier.judges import ALPHA, BETA, SHARE
from proofserve.verifier.judging import JudgingOptions, VerdictReport, judged
from proofserve.verifier.nodes.beside_checkpoint import TrustedNodes
from proofserve.verifier.nodes.sources import WitnessError
from proofserve.verifier.orders import workload_of

app = typer.Typer()

# By a sketch honest nodes of real models were cleared after 23 to 36 in the median, and within
# these in 99 of 100; artifact-v1 takes more. Forging less shows when challenges repeat.
NONCES: Final = 100
DEADLINE_S: Final = 60.0
# The verdict about an answer.
_Judge = Callable[[challenge.ChallengeAnswer], VerdictReport]
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}
# The exit code of several challenges is the first of these that one of them had.
_WORST_FIRST: Final = (
    EXIT_CODES[SequentialResult.FRAUD],
    EXIT_NO_VERDICT,
    EXIT_CODES[SequentialResult.UNDECIDED],
    EXIT_CODES[SequentialResult.HONEST],
)


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


@app.command("challenge", cls=VerdictCommand)
def command(
    ctx: typer.Context,
    url: Annotated[
        str | None,
        typer.Argument(
            callback=options.needed_without_plan, help="The node, or a fleet. --plan needs none."
        ),
    ] = None,
    *,
    model: Annotated[
        Path | None, typer.Option(help="The checkpoint that it claims to serve.")
    ] = None,
    calibration: options.Calibration = None,
    reference: options.References = None,
    suspect_node: options.SuspectNodes = None,
    reference_api_key: options.ReferenceApiKey = None,
    nonces: Annotated[int, typer.Option(help="How many to ask for at a time.", min=1)] = NONCES,
    deadline: Annotated[
        float, typer.Option(help="Seconds within which the whole answer must come.", min=0.1)
    ] = DEADLINE_S,
    every: Annotated[
        float | None,
        typer.Option(
            parser=seconds_of,
            metavar="TIME",
            help="Challenge again and again until Ctrl-C, so far apart: 90s, 10m, 2h.",
        ),
    ] = None,
    suspect: options.Suspects = None,
    api_key: options.ApiKey = None,
    device: options.Device = "cpu",
    forward_batch: options.ForwardBatch = 8,
    alpha: options.Alpha = ALPHA,
    beta: options.Beta = BETA,
    share: options.Share = SHARE,
    plan: options.Plan = False,
    json: options.Json = None,
    bundle: options.BundleFile = None,
) -> None:
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
    with open_session(EXIT_NO_VERDICT) as session:
        daily = challenge.DailyAlpha(alpha, every) if every is not None else None
        tally = challenge.Tally(str(url), daily)
        try:
            with session.interrupts.allowed():
                measured = read(calibration) if calibration else None
                of_one = daily.of_one if daily else alpha
                judging = JudgingOptions((), of_one, beta, share, threshold=measured)
                order = calibrated_order(measured)
                others = reference, suspect_node, reference_api_key
                nodes = given_nodes(*others, ctx.params, {url})
                if bundle is not None and nodes is not None and model is not None:
                    text = "it holds a verdict by --model or by --reference, not by both"
                    raise ReportedError(f"--bundle: {text}")
                if nodes is not None and model is None:
                    judge = _by_nodes(nodes, judging, session)
                else:
                    setup = model or _no_model(), device, forward_batch, suspect, nodes
                    judge = _by_weights(setup, order, judging, nonces if plan else None, session)
                judged_with = calibration, tuple(suspect or ())
                challenger = _Challenger(
                    tally.url, api_key, order, nonces, deadline, judge, bundle, judged_with, nodes
                )
                _challenge(challenger, tally, every, json, session)
        except SystemExit:
            # A signal ends a repeated challenge, and what it has found counts.
            if every is None or not tally.newest:
                raise
        if every is not None:
            session.tell(tally.text)
        if json is not None:
            write_json(json, tally.record())
        codes = {EXIT_CODES[outcome] for outcome in tally.counts}
        raise typer.Exit(worst_exit_code(codes))


def worst_exit_code(codes: Collection[int]) -> int:
    """Of several verdicts, of which there is one at least."""
    return next(code for code in _WORST_FIRST if code in codes)


def _no_model() -> NoReturn:
    raise ReportedError("give --model CHECKPOINT, or --reference NODE twice or more")


def _by_nodes(nodes: TrustedNodes, judging: JudgingOptions, session: CommandSession) -> _Judge:
    """What other nodes say about the same nonces."""

    def judge(found: challenge.ChallengeAnswer) -> VerdictReport:
        with session.interrupts.allowed():
            sample = fresh_seed(), None
            return nodes.report(found.claimed, found.order, judging, sample, session.line)

    return judge


def _by_weights(
    setup: tuple[Path, str, int, Sequence[Path] | None, TrustedNodes | None],
    order: Work,
    judging: JudgingOptions,
    planned: int | None,
    session: CommandSession,
) -> _Judge:
    """Loads a checkpoint once; ``setup`` has its folder, a device, a batch, suspects, and nodes.

    If so many nonces are ``planned``, only tells what they cost, and raises typer.Exit.
    """
    # It imports torch, which other nodes in the place of weights do not need.
    from proofserve.cli import recompute  # noqa: PLC0415

    model, device, forward_batch, suspects, nodes = setup
    work, measured = workload_of(order), judging.calibration
    recompute.warn_of_few_values(work, session)
    made = validator_setup(model, device, suspects, measured)
    if planned is not None:
        tell_plan_of_verdict(made, work, judging, (planned, {}), forward_batch, session)
        raise typer.Exit
    session.line.step(f"loading {model}")
    truth = truths_of_checkpoint(made, work, forward_batch, session.line.layer)
    if measured is not None:
        digest = truth(work).weights_digest
        measured.require(work, [model.name], checkpoint_shape(model), digest)

    def judge(found: challenge.ChallengeAnswer) -> VerdictReport:
        ours, sample = truth(workload_of(found.order)), (fresh_seed(), None)
        if nodes is not None:
            return nodes.report(found.claimed, found.order, judging, sample, session.line, ours)
        return judged(found.claimed, ours, judging, *sample, session.line)

    return judge


@dataclass(frozen=True, slots=True)
class _Challenger:
    """Asks a node for ``nonces`` at a time of work of this ``shape``, and judges the answers."""

    url: str
    api_key: str | None = field(repr=False)
    shape: Work
    nonces: int
    deadline_s: float
    judge: _Judge
    bundle: Path | None
    # The calibration and the suspects that the judge has.
    judged_with: tuple[Path | None, Sequence[Path]]
    nodes: TrustedNodes | None

    def once(self, progress: Progress) -> challenge.ChallengeResult:
        """One challenge. Raises the errors of our own recomputation."""
        asked, heard = challenge.fresh(self.shape, self.nonces), Transcript()
        progress.step(f"waiting for {self.nonces} nonces, at most {self.deadline_s:g} s")
        try:
            with BoundedClient(
                self.url, self.api_key, challenge.DESCRIBES_ITSELF_S, heard
            ) as client:
                found = challenge.answer(client, asked, self.deadline_s)
            report = self.judge(found)
        except UnprovedError as error:
            unproved = SequentialResult.UNPROVED
            return challenge.ChallengeResult(
                unproved, asked, str(error), error.seconds, kind=error.kind
            )
        except WitnessError as error:
            # The node has answered; a repeated challenge goes on when its judges are back.
            none = SequentialResult.UNEXPLAINED
            return challenge.ChallengeResult(none, asked, str(error), found.seconds, found)
        node = HeardNode(self.url, heard, challenge=asked)
        unwritten = write_bundle(self.bundle, node, report, None, self.judged_with, self.nodes)
        reason = f"{report.reason}; {unwritten}" if unwritten else report.reason
        return challenge.ChallengeResult(
            report.outcome.verdict, asked, reason, found.seconds, found, report
        )


def _challenge(
    challenger: _Challenger,
    tally: challenge.Tally,
    every: float | None,
    json: Path | None,
    session: CommandSession,
) -> None:
    """Challenge once, or until a signal, and add what is found to ``tally``."""
    while True:
        began = time.monotonic()
        result = challenger.once(session.line)
        tally.add(result, time.monotonic())
        if every is None and result.report is not None:
            show(session, result.outcome, result.report.lines())
        left = f"; {tally.alpha_left}" if tally.alpha else ""
        session.tell(f"{result.line}{left}", COLOURS[result.outcome])
        if every is None:
            return
        if json is not None:
            write_json(json, tally.record())
        session.line.rest(f"{tally.text}; the next one is due after {every:g} s")
        time.sleep(max(0.0, began + every - time.monotonic()))
