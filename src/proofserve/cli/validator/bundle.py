"""``proofserve verify-bundle``: whether a verdict of another validator is true."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from proofserve.cli.command import verdict_command
from proofserve.cli.session import EXIT_CODES, EXIT_NO_VERDICT, CommandSession
from proofserve.cli.validator.options import CalibrationOptions, RecomputationOptions
from proofserve.protocol.nonces import fresh_seed
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.records import Work
from proofserve.reports import Progress, ReportedError, read_json
from proofserve.verifier.bundle import (
    Bundle,
    BundledOptions,
    differences,
    digest_of_file,
    digests_of,
    faults_of,
)
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judging import VerdictReport

app = typer.Typer()


class VerifyBundleOptions(RecomputationOptions, CalibrationOptions):
    file: Annotated[Path, typer.Argument()]
    """What `verify` or `challenge --bundle` wrote."""
    model: Path | None = None
    """The published checkpoint; without it --check-only."""
    check_only: Annotated[bool, typer.Option("--check-only")] = False
    """Compute no vector: a second, without a model."""


@verdict_command(app, "verify-bundle")
def verify_bundle(given: VerifyBundleOptions, session: CommandSession) -> int:
    """Check a verdict of another validator, and compute it again.

    The claims in a bundle are answers that the node signed. --check-only says whether the file is
    as it was written, the signatures are of one key, and sample, distances and verdict follow
    from the rest. What it cannot know is whether the vectors beside the claims are those of the
    published weights: with --model they are computed again, and so is the verdict. A verdict by
    other nodes (--reference) is computed again from their signed answers, without a model.

    A conviction is also judged with a seed of now, because who made it could have tried many.

    What is left to you: whether the key is the node's (GET /api/v1/pow/versions shows it, or your
    network's list of nodes), whether those of other nodes are of nodes that you trust, and whether
    you would have judged with these numbers, this calibration, or this threshold.

    Exit code: that of the verdict, 0 honest, 1 fraud, 2 undecided, if all holds; with --check-only
    0 if all holds. 3: something does not hold, or the verdict is another one here.

    \b
    proofserve challenge http://node:8000 --model ./model --bundle verdict.json
    proofserve verify-bundle verdict.json --check-only
    proofserve verify-bundle verdict.json --model ./model
    """
    session.line.step(f"reading {given.file}")
    if faults := [*faults_of(given.file)]:
        session.tell("\n".join(faults), "red")
        return EXIT_NO_VERDICT
    bundle = read_json(given.file, Bundle)
    session.tell("\n".join(_about(bundle, *bundle.claims())))
    if given.check_only:
        return 0
    judge = _judge_of(bundle, given, session.line)
    report = judge(bundle.seed)
    if changed := [*differences(bundle, report)]:
        session.tell("\n".join(changed), "red")
        return EXIT_NO_VERDICT
    session.show(report.outcome.verdict, report.lines())
    if report.outcome.verdict is SequentialResult.FRAUD:
        again = judge(fresh_seed()).outcome
        if again.verdict is not SequentialResult.FRAUD:
            text = f"another sample of the same answers does not convict: {again.verdict}"
            session.tell(f"{text} after {again.nonces_used} nonces", "red")
            return EXIT_NO_VERDICT
        session.tell(f"So does another sample, after {again.nonces_used} nonces.")
    return EXIT_CODES[report.outcome.verdict]


def _judge_of(
    bundle: Bundle, given: VerifyBundleOptions, progress: Progress
) -> Callable[[str], VerdictReport]:
    """The verdict of this machine by a seed.

    Raises ReportedError for other judges and other files than were used.
    """
    if bundle.witnesses:
        if given.model is not None:
            raise ReportedError("--model: other nodes judged here, and no checkpoint: leave it out")
        return bundle.beside_witnesses()
    if given.model is None:
        raise ReportedError("give --model CHECKPOINT, or --check-only")
    found = given.calibration and digest_of_file(given.calibration)
    if found != bundle.judged_by.calibration:
        text = f"{found or 'none'}, the verdict was made with {bundle.judged_by.calibration}"
        raise ReportedError(f"--calibration: its SHA-256 is {text}")
    if (known := digests_of(given.suspect)) != [*bundle.judged_by.suspects]:
        raise ReportedError(f"--suspect: {known or 'none'} are not {bundle.judged_by.suspects}")
    options = bundle.judged_by.options(given.measured())
    claimed, order = bundle.claims()
    judge = given.judging(given.model, None, options).judge_of(order, progress)
    return lambda seed: judge(claimed, order, (seed, bundle.most))


def _about(bundle: Bundle, claimed: ClaimedArtifacts, order: Work) -> list[str]:
    made = datetime.fromtimestamp(bundle.made_ms / 1000, UTC)
    times = [each.time_ms for each in bundle.answers if each.signature]
    first, last = (datetime.fromtimestamp(at / 1000, UTC) for at in (min(times), max(times)))
    verdict, used = bundle.report["verdict"], bundle.report["nonces_used"]
    return [
        f"{len(times)} answers are signed by {bundle.public_key}, by its clock from"
        f" {first:%Y-%m-%d %H:%M:%S} to {last:%H:%M:%S} UTC",
        f"sample, distances and verdict agree: {verdict} after {used} nonces, made"
        f" {made:%Y-%m-%d %H:%M:%S} UTC",
        f"the node says that it serves weights of the digest {claimed.weights_digest or '(none)'}",
        f"of {order.scheme}, seq_len {order.seq_len}, k_dim {order.k_dim}; judged with"
        f" {', '.join(_numbers(bundle.judged_by))}",
        *(
            f"{'of a cheat' if each.is_suspect else 'trusted'}: {each.name}, signed by"
            f" {each.public_key}"
            for each in bundle.witnesses
        ),
    ]


def _numbers(judged_by: BundledOptions) -> list[str]:
    """What a third party might have chosen otherwise."""
    said = [f"alpha {judged_by.alpha:g}", f"beta {judged_by.beta:g}", f"share {judged_by.share:g}"]
    if judged_by.tests:
        said.append(f"the tests {' '.join(judged_by.tests)}")
    if judged_by.dist_threshold is not None:
        said.append(f"a threshold of {judged_by.dist_threshold:g}, which the validator chose")
    if judged_by.calibration is not None:
        said.append(f"a calibration whose SHA-256 is {judged_by.calibration}")
    if judged_by.suspects:
        said.append(f"{len(judged_by.suspects)} suspected checkpoints")
    return said
