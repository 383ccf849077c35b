"""``proofserve audit``: whether validators would notice a node that saves work."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from proofserve.cli.options import (
    Calibration,
    Device,
    DistThreshold,
    ForwardBatch,
    Json,
    PMismatch,
    StrongerRng,
)
from proofserve.cli.session import EXIT_FAILED, EXIT_NO_VERDICT, VerdictCommand, open_session
from proofserve.lab.audit.audit import audit
from proofserve.lab.audit.audit_page import page
from proofserve.lab.audit.audit_report import AuditReport
from proofserve.lab.audit.conviction import ConvictionRule
from proofserve.lab.calibrate.calibration_file import checkpoint_shape, measured_threshold
from proofserve.lab.report.json_files import write_json
from proofserve.lab.report.machine import machine
from proofserve.lab.verify.claimed import vector_scheme
from proofserve.protocol.identity import Block
from proofserve.rounds.records import Workload
from proofserve.wiring.audit import AuditSetup, CheckpointDeployment

app = typer.Typer()

# Nonces per attack.
NONCES, QUICK_NONCES = 96, 24


@app.command("audit", cls=VerdictCommand)
def command(
    model: Annotated[Path, typer.Argument(help="The checkpoint that is deployed; needs no vLLM.")],
    dist_threshold: DistThreshold = None,
    calibration: Calibration = None,
    p_mismatch: PMismatch = None,
    alpha: Annotated[float, typer.Option(help="Chance to convict an honest node.")] = 1e-6,
    power: Annotated[float, typer.Option(help="Required chance to convict a cheat.")] = 0.999,
    max_nonces: Annotated[
        int, typer.Option(help="Most nonces that a validator recomputes.", min=1)
    ] = 1000,
    nonces: Annotated[
        int | None,
        typer.Option(help=f"Nonces per attack; {NONCES}, or {QUICK_NONCES} with --quick.", min=1),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer nonces, so wider intervals.")
    ] = False,
    other: Annotated[
        Path | None, typer.Option(help="Another checkpoint of this shape; random weights if unset.")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens per nonce.", min=2)] = 256,
    k_dim: Annotated[int, typer.Option(help="Values per vector.", min=1)] = 12,
    scheme: Annotated[str, typer.Option(help="artifact-v1 or artifact-v1-layers.")] = "artifact-v1",
    stronger_rng: StrongerRng = False,
    dtype: Annotated[
        str | None, typer.Option(help="Of the prover: bfloat16, ...; the checkpoint's if unset.")
    ] = None,
    validator_dtype: Annotated[
        str, typer.Option(help="Of the validator; a difference from --dtype shows rounding.")
    ] = "float32",
    device: Device = "cpu",
    forward_batch: ForwardBatch = 8,
    json: Json = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report as a web page to this file.")
    ] = None,
) -> None:
    """Try every known attack on a deployment, and say which its validators would notice.

    The attacks round weights, skip layers, cut the context, swap the
    checkpoint, reuse and forge vectors, and cheat on a part of the nonces.
    The report shows their distances and the compute that they save.

    An attack is CAUGHT if the exact binomial test over at most --max-nonces
    convicts with a chance of --power, at the lower end of the 95 % interval
    of its rate of mismatches. The report also names a sequential test.

    Exit code 0: every attack that saves 10 % of the compute or more is
    caught. 1: one is not, or honest nodes would be convicted. 3: no verdict.

    The threshold has no default. Measure it first, on an honest engine:

    \b
    proofserve calibrate noise ./model --seq-len 256 --out calibration.json
    proofserve audit ./model --calibration calibration.json --html audit.html
    proofserve audit ./model --dist-threshold 0.026 --p-mismatch 0.01 --quick
    """
    began = time.monotonic()
    with open_session(EXIT_NO_VERDICT) as session, session.interrupts.allowed():
        threshold = measured_threshold(dist_threshold, calibration, p_mismatch)
        limit, p_honest = threshold.dist_threshold, threshold.p_mismatch
        rule = ConvictionRule(limit, p_honest, alpha, power, max_nonces)
        setup = AuditSetup(
            model=model,
            scheme=vector_scheme(scheme, k_dim, stronger_rng),
            seq_len=seq_len,
            dtype=dtype,
            validator_dtype=validator_dtype,
            device=device,
            forward_batch=forward_batch,
            other=other,
        )
        work = Workload(setup.scheme, Block("", 0), "", seq_len)
        threshold.require(work, [model.name], checkpoint_shape(model))
        if threshold.calibration is not None:
            threshold.calibration.validator_dtype(validator_dtype)
        count = nonces or (QUICK_NONCES if quick else NONCES)
        session.line.step(f"loading {model}")
        deployment = CheckpointDeployment(setup)
        found = audit(deployment, rule, count, session.line)
        facts = {**_facts(setup, count, began), "threshold": threshold.origin}
        report = AuditReport(found, deployment.price, facts, machine())
        # Shown first, so that the result is not lost if a file cannot be written.
        _show(session.console, report)
        if json is not None:
            write_json(json, report.json())
        if html is not None:
            html.write_text(page(report), encoding="utf-8")
    raise typer.Exit(0 if found.passed else EXIT_FAILED)


def _facts(setup: AuditSetup, nonces: int, began: float) -> dict[str, str | int]:
    return {
        "model": setup.model.resolve().name,
        "scheme": setup.scheme.name,
        "values": setup.scheme.width,
        "seq_len": setup.seq_len,
        "prover": setup.dtype or "the checkpoint's dtype",
        "validator": setup.validator_dtype,
        "device": setup.device,
        "other_checkpoint": setup.other.name if setup.other else "drawn at random",
        "nonces_per_attack": nonces,
        "seconds": round(time.monotonic() - began),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _show(console: Console, report: AuditReport) -> None:
    console.print(report.table())
    for sentence in (*report.missed, report.rule, report.shortcuts):
        console.print(sentence, markup=False, soft_wrap=True)
    colour = "green" if report.audit.passed else "red"
    console.print(report.audit.verdict, style=f"bold {colour}", markup=False, soft_wrap=True)
