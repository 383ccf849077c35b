"""``proofserve verify``: whether a node runs the model that it claims."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from proofserve.cli.options import (
    ApiKey,
    Calibration,
    Device,
    DistThreshold,
    ForwardBatch,
    Json,
    PMismatch,
    StrongerRng,
)
from proofserve.cli.recompute import Compute, by_checkpoint, by_node, read_file
from proofserve.cli.session import EXIT_NO_VERDICT, VerdictCommand, open_session
from proofserve.lab.calibrate.calibration_file import checkpoint_shape, measured_threshold
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.vectors import vectors_of
from proofserve.lab.report.json_files import write_json
from proofserve.lab.verify.claimed import (
    ClaimedArtifacts,
    Selection,
    completed,
    from_node,
    workload,
)
from proofserve.lab.verify.verification import Vectors, Verification, VerificationRule, draw, verify
from proofserve.protocol.verdict.sequential import SequentialResult, SequentialTest

app = typer.Typer()

EXIT_CODES = {SequentialResult.HONEST: 0, SequentialResult.FRAUD: 1, SequentialResult.UNDECIDED: 2}
COLOURS = {
    SequentialResult.HONEST: "green",
    SequentialResult.FRAUD: "red",
    SequentialResult.UNDECIDED: "yellow",
}
SHOWN = 10


@app.command("verify", cls=VerdictCommand)
def command(
    source: Annotated[
        str, typer.Argument(help="A JSON file, a file of `proofserve receive`, or a node's URL.")
    ],
    dist_threshold: DistThreshold = None,
    calibration: Calibration = None,
    model: Annotated[
        Path | None, typer.Option(help="Recompute with this checkpoint; needs no vLLM.")
    ] = None,
    recompute_url: Annotated[
        str | None, typer.Option(help="Or recompute on this node, which you trust.")
    ] = None,
    api_key: ApiKey = None,
    recompute_api_key: Annotated[
        str | None, typer.Option(envvar="POC_RECOMPUTE_API_KEY", help="A key of that node.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, ...; if unset, of the calibration or checkpoint.")
    ] = None,
    device: Device = "cpu",
    forward_batch: ForwardBatch = 8,
    scheme: Annotated[
        str | None,
        typer.Option(help="artifact-v1 or -layers; artifact-v1 if the source does not say."),
    ] = None,
    stronger_rng: StrongerRng = False,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens per nonce, if the source does not say.", min=1)
    ] = None,
    k_dim: Annotated[
        int | None, typer.Option(help="Values per vector, if the source does not say.", min=1)
    ] = None,
    block_hash: Annotated[str | None, typer.Option(help="If the source has several.")] = None,
    public_key: Annotated[str | None, typer.Option(help="If the source has several.")] = None,
    seed: Annotated[
        str, typer.Option(help="Selects the sample; keep it secret until the artifacts are public.")
    ] = "0",
    nonces: Annotated[
        int | None, typer.Option(help="Size of the sample; all nonces if unset.", min=1)
    ] = None,
    sequential: Annotated[
        bool,
        typer.Option("--sequential/--fixed", help="Stop when certain, or use the whole sample."),
    ] = True,
    p_mismatch: PMismatch = None,
    p_fraud: Annotated[
        float, typer.Option(help="Least share of mismatches by a fraudulent node.")
    ] = 0.5,
    alpha: Annotated[float, typer.Option(help="Chance to convict an honest node.")] = 1e-6,
    beta: Annotated[float, typer.Option(help="Chance to clear a fraudulent node.")] = 1e-3,
    json: Json = None,
) -> None:
    """Recompute a sample of a node's artifacts, and reach a verdict: honest or fraud.

    Exit code 0: honest. 1: fraud. 2: undecided, because there were too few nonces.
    3: no verdict: an option, a source or the recomputation is wrong.

    A missing, repeated, malformed or non-finite artifact is a mismatch.

    The threshold has no default. Measure it first, on an honest engine:

    \b
    proofserve calibrate noise ./model --seq-len 256 --out calibration.json
    proofserve verify artifacts.json --model ./model --calibration calibration.json
    proofserve verify received.sqlite --model ./model --calibration calibration.json
    proofserve verify http://node:8000 --model ./model --dist-threshold 0.026 --p-mismatch 0.01
    """
    with open_session(EXIT_NO_VERDICT) as session, session.interrupts.allowed():
        threshold = measured_threshold(dist_threshold, calibration, p_mismatch)
        test = SequentialTest(threshold.p_mismatch, p_fraud, alpha, beta)
        rule = VerificationRule(test, threshold.dist_threshold, sequential, at_once=forward_batch)
        if (model is None) == (recompute_url is None):
            raise LabError("give exactly one of --model CHECKPOINT and --recompute-url NODE")
        session.line.step(f"reading {source}")
        claimed = _read(source, api_key, Selection(block_hash, public_key))
        if measured := threshold.calibration:
            dtype = measured.validator_dtype(dtype) if model else dtype
            seq_len = seq_len or (None if claimed.seq_len else measured.seq_len)
            k_dim = k_dim or (None if claimed.k_dim else measured.k_dim)
        claimed = completed(claimed, seq_len, k_dim, scheme)
        work = workload(claimed, stronger_rng)
        session.line.step(f"loading {model}" if model else f"asking {recompute_url}")
        with ExitStack() as stack:
            if model is not None:
                threshold.require(work, [model.name], checkpoint_shape(model))
                compute = by_checkpoint(work, model, dtype, device, forward_batch)
            else:
                node = stack.enter_context(NodeClient(str(recompute_url), recompute_api_key))
                models = node.models()
                threshold.require(work, models, None)
                compute = by_node(work, node, models[0])
            sample = draw(claimed.nonces, seed, nonces)
            recompute = partial(_vectors, compute, work.scheme.width)
            outcome = verify(claimed, sample, recompute, rule, session.line)
        _show(session.console, outcome, rule, len(claimed.nonces), seed)
        session.console.print(f"Threshold: {threshold.origin}.", markup=False, soft_wrap=True)
        if json is not None:
            record = _record(outcome, rule, claimed, seed)
            write_json(json, {**record, "threshold_from": threshold.origin})
    raise typer.Exit(EXIT_CODES[outcome.verdict])


def _vectors(compute: Compute, k_dim: int, nonces: Sequence[int]) -> Vectors:
    return vectors_of(compute(nonces), k_dim)


def _read(source: str, api_key: str | None, wanted: Selection) -> ClaimedArtifacts:
    if not source.startswith(("http://", "https://")):
        return read_file(Path(source), wanted)
    with NodeClient(source, api_key) as node:
        claimed = from_node(node)
    if not wanted.fits(claimed.block_hash, claimed.public_key):
        raise LabError(f"{source} has block {claimed.block_hash}, key {claimed.public_key}")
    return claimed


def _show(
    console: Console, outcome: Verification, rule: VerificationRule, claimed: int, seed: str
) -> None:
    console.print(f"[bold {COLOURS[outcome.verdict]}]{outcome.verdict}[/]")
    figure = "likelihood ratio" if rule.sequential else "p-value"
    console.print(
        f"{outcome.nonces_used} of {claimed} nonces recomputed (seed {seed}),"
        f" {len(outcome.mismatches)} mismatches, {figure} {outcome.figure:.3g}"
    )
    for mismatch in outcome.mismatches[:SHOWN]:
        far = "" if mismatch.distance is None else f" by {mismatch.distance:.4f}"
        why = f"{mismatch.reason}{far} {mismatch.detail}"
        console.print(f"  nonce {mismatch.nonce}: {why}".rstrip())
    if (more := len(outcome.mismatches) - SHOWN) > 0:
        console.print(f"  and {more} more")
    console.print(rule.description, soft_wrap=True)


def _record(
    outcome: Verification, rule: VerificationRule, claimed: ClaimedArtifacts, seed: str
) -> dict[str, object]:
    return {
        "verdict": outcome.verdict,
        "nonces_used": outcome.nonces_used,
        "nonces_claimed": len(claimed.nonces),
        "mismatches": [asdict(mismatch) for mismatch in outcome.mismatches],
        "likelihood_ratio" if rule.sequential else "p_value": outcome.figure,
        "seed": seed,
        "block_hash": claimed.block_hash,
        "public_key": claimed.public_key,
        "dist_threshold": rule.dist_threshold,
        "sequential": rule.sequential,
        "test": asdict(rule.test),
        "rule": rule.description,
    }
