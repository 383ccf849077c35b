"""``proofserve audit``: whether validators would notice a node that saves work."""

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from proofserve.cli import options
from proofserve.cli.model import NAMES, Checkpoint, checkpoint_named
from proofserve.cli.session import (
    EXIT_FAILED,
    EXIT_NO_VERDICT,
    CommandSession,
    VerdictCommand,
    open_session,
)
from proofserve.cli.validator.plans import tell_plan
from proofserve.host import machine
from proofserve.protocol import (
    ARTIFACT,
    ARTIFACT_LAYERS,
    DEFAULT_SCHEME,
    SEQ_LEN,
    SKETCHES,
    TWINS,
    default_k_dim,
)
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import Scheme
from proofserve.reports import Progress, write_json
from proofserve.rounds.records import Workload
from proofserve.verifier.audit.attacks import attacks
from proofserve.verifier.audit.audit import FEWEST, RUNS, Audit, AuditOptions, ConvictionRule, audit
from proofserve.verifier.audit.deployment import PRUNED_EXPERTS, AuditSetup, CheckpointDeployment
from proofserve.verifier.audit.report import AuditReport, page
from proofserve.verifier.calibration_file import (
    NETWORK_P_MISMATCH,
    CalibrationFile,
    checkpoint_shape,
    measured_threshold,
)
from proofserve.verifier.judges import ALPHA
from proofserve.verifier.orders import vector_scheme
from proofserve.verifier.plans import Pass, audit_passes
from proofserve.verifier.validator import CheckpointValidator

app = typer.Typer()

# Nonces per prover.
NONCES, QUICK_NONCES = 96, 24
# Suspects with --quick, one of each kind.
QUICK_BANK: Final = ("int8 per channel", "int8 g32", "fp8 per channel", "int4 g128")


@app.command("audit", cls=VerdictCommand)
def command(
    model: Annotated[
        str,
        typer.Argument(help=f"The deployed model: {', '.join(NAMES)}, or a checkpoint's folder."),
    ],
    size: options.Size = "small",
    dist_threshold: options.DistThreshold = None,
    calibration: options.Calibration = None,
    p_mismatch: options.PMismatch = None,
    alpha: Annotated[float, typer.Option(help="Chance to convict an honest node.")] = ALPHA,
    power: Annotated[float, typer.Option(help="Required chance to convict a cheat.")] = 0.999,
    max_nonces: Annotated[
        int, typer.Option(help="Most nonces that a validator recomputes.", min=1)
    ] = 1000,
    nonces: Annotated[
        int | None,
        typer.Option(
            help=f"Nonces per prover; {NONCES}, or {QUICK_NONCES} with --quick.", min=FEWEST
        ),
    ] = None,
    verifications: Annotated[int, typer.Option(help="Simulated of each prover.", min=1)] = RUNS,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"Fewer nonces; of the bank {', '.join(QUICK_BANK)}.")
    ] = False,
    other: Annotated[
        Path | None,
        typer.Option(help="Another, also a smaller, checkpoint of this hidden size; else random."),
    ] = None,
    suspect: options.Suspects = None,
    seq_len: Annotated[int, typer.Option(help="Tokens per nonce.", min=2)] = SEQ_LEN,
    k_dim: options.KDim = None,
    scheme: Annotated[
        str, typer.Option(help=f"{ARTIFACT}, {ARTIFACT_LAYERS}, {' or '.join(SKETCHES)}.")
    ] = DEFAULT_SCHEME,
    stronger_rng: options.StrongerRng = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="That is served: bfloat16 or float16; the checkpoint's if unset."),
    ] = None,
    device: options.Device = "cpu",
    forward_batch: options.ForwardBatch = 8,
    plan: options.Plan = False,
    json: options.Json = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report as a web page to this file.")
    ] = None,
) -> None:
    """Try every known attack on a deployment, and say which its validators would notice.

    The attacks round weights, activations and caches, prune, skip layers,
    cut the context, swap the checkpoint, reuse and forge vectors, and cheat
    on a part of the nonces. The report shows their distances, the compute
    that they save, and after how many nonces each test convicts them. Of a
    mixture of experts proved by a sketch it also shows pruned experts by the
    other sketch, so that natural routing and the block's stand side by side.

    An attack is CAUGHT if `verify` (see its --help) convicts it within
    --max-nonces with a chance of --power. On some there is NO VERDICT: neither
    an honest kernel nor a fraud that is known explains them, and they are not
    cleared. Honest nodes are judged as well, by every kernel that is emulated.

    Without --calibration a node is honest if it is like one of these emulated
    kernels, as measured on the nonces of this audit: they are few, so its test
    of sizes convicts later than with a calibration. Without a threshold the
    count uses the distance that a share --p-mismatch of the vectors of the
    farthest kernel exceeds, by a fit.

    Exit code 0: every attack that saves 10 % of the compute or more is caught
    or gets no verdict. 1: one is not, or honest nodes would be convicted. 3:
    the model cannot be audited.

    \b
    proofserve audit ./model --plan
    proofserve audit ./model --quick
    proofserve audit trained
    proofserve calibrate noise ./model --out calibration.json
    proofserve audit ./model --calibration calibration.json --html audit.html
    proofserve audit ./model --scheme sketch-v2 --suspect ./model-awq --other ./smaller
    """
    began = time.monotonic()
    with open_session(EXIT_NO_VERDICT) as session, session.interrupts.allowed():
        deployed = checkpoint_named(model, size, session.line.step, for_plan=plan)
        given = calibration is not None or dist_threshold is not None
        threshold = measured_threshold(dist_threshold, calibration, p_mismatch) if given else None
        known = threshold if isinstance(threshold, CalibrationFile) else None
        if known is not None and dtype is not None:
            known.require_served(dtype, known.kv_dtype)
        setup = AuditSetup(
            deployed.folder,
            device,
            tuple(suspect or ()),
            dtype,
            scheme=vector_scheme(scheme, k_dim or default_k_dim(scheme), stronger_rng),
            seq_len=seq_len,
            forward_batch=forward_batch,
            other=other,
            bank=QUICK_BANK if quick else None,
        ).serving_as(known)
        rate = threshold.p_mismatch if threshold else p_mismatch or NETWORK_P_MISMATCH
        auditing = AuditOptions(
            ConvictionRule(rate, alpha, power, max_nonces),
            nonces or (QUICK_NONCES if quick else NONCES),
            known.honest if known else None,
            threshold.dist_threshold if threshold else None,
            verifications,
            price=not quick,
        )
        if plan:
            _end_with_plan(setup, auditing.nonces, session)
        session.line.step(f"loading {model}")
        deployment = CheckpointDeployment(setup)
        _require_fit(known, deployed, setup, deployment)
        found = audit(deployment, auditing, session.line)
        beside = _other_routing(deployment, setup.scheme, auditing, session.line)
        honest = known.origin if known else "the kernels emulated in this audit"
        facts = {**_facts(deployed.name, setup, auditing.nonces, began), "honest": honest}
        report = AuditReport(found, deployment.price, facts, machine(), beside)
        _show(report, json, html, session)
    raise typer.Exit(0 if found.passed else EXIT_FAILED)


def _end_with_plan(setup: AuditSetup, nonces: int, session: CommandSession) -> NoReturn:
    # Another checkpoint costs what random weights do.
    deployment = CheckpointDeployment(replace(setup, unread=True, other=None))
    cheats = [prover.name for prover in attacks(deployment, 0.0)]

    def passes_of(of: CheckpointValidator) -> list[Pass]:
        bank = deployment.names, of.kernels, of.references
        both = setup.scheme.name in SKETCHES and deployment.mixes_experts
        again = audit_passes(nonces, bank, [*PRUNED_EXPERTS]) if both else []
        return [*audit_passes(nonces, bank, cheats), *again]

    work = Workload(setup.scheme, Block("", 0), "", setup.seq_len)
    about = f"nonces of each prover, {len(cheats)} of which cheat"
    tell_plan(setup, work, setup.forward_batch, passes_of, about, session)
    raise typer.Exit


def _require_fit(
    known: CalibrationFile | None,
    deployed: Checkpoint,
    setup: AuditSetup,
    deployment: CheckpointDeployment,
) -> None:
    if known is None:
        return
    work = Workload(setup.scheme, Block("", 0), "", setup.seq_len)
    shape, digest = checkpoint_shape(deployed.folder), deployment.weights_digest
    known.require(work, [deployed.name], shape, digest, deployment.is_dense)


def _other_routing(
    deployment: CheckpointDeployment, scheme: Scheme, auditing: AuditOptions, line: Progress
) -> dict[str, Audit]:
    """Of a mixture proved by a sketch: pruned experts by the other sketch, under its name."""
    if scheme.name not in SKETCHES or not deployment.mixes_experts:
        return {}
    (other,) = (name for name in SKETCHES if name != scheme.name)
    routed = deployment.with_routing(vector_scheme(other, scheme.width // TWINS, False))
    few = replace(auditing, honest=None, dist_threshold=None, only=PRUNED_EXPERTS, price=False)
    line.step(f"pruned experts by {other}")
    return {other: audit(routed, few, line)}


def _facts(name: str, setup: AuditSetup, nonces: int, began: float) -> dict[str, str | int]:
    return {
        "model": name,
        "scheme": setup.scheme.name,
        "values": setup.scheme.width,
        "seq_len": setup.seq_len,
        "served_dtype": setup.served_dtype or "the checkpoint's",
        "device": setup.device,
        "bank": ", ".join(setup.bank) if setup.bank else "all suspects",
        "other_checkpoint": setup.other.name if setup.other else "drawn at random",
        "nonces_per_prover": nonces,
        "seconds": round(time.monotonic() - began),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _show(
    report: AuditReport, json: Path | None, html: Path | None, session: CommandSession
) -> None:
    """Print the report first, so that it is not lost if a file cannot be written."""
    session.console.print(report.table())
    for sentence in (
        *report.missed,
        *([report.prices] if report.prices else []),
        report.honest_cleared,
        report.cleared_first,
        *([report.routing] if report.routing else []),
        report.rule,
        report.shortcuts,
    ):
        session.tell(sentence)
    session.tell(report.audit.verdict, f"bold {'green' if report.audit.passed else 'red'}")
    if json is not None:
        write_json(json, report.json())
    if html is not None:
        html.write_text(page(report), encoding="utf-8")
