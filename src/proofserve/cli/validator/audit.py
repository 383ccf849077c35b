"""``proofserve audit``: whether validators would notice a node that saves work."""

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from pydantic import Field

from proofserve.cli.command import Size, verdict_command
from proofserve.cli.model import NAMES, checkpoint_named
from proofserve.cli.recompute import tell_plan
from proofserve.cli.session import EXIT_FAILED, CommandSession
from proofserve.cli.validator.options import (
    PageOptions,
    PlanOptions,
    RecomputationOptions,
    ThresholdOptions,
)
from proofserve.host import machine
from proofserve.protocol import (
    ARTIFACT,
    ARTIFACT_K_DIM,
    ARTIFACT_LAYERS,
    DEFAULT_SCHEME,
    SEQ_LEN,
    SKETCH_K_DIM,
    SKETCHES,
    TWINS,
    default_k_dim,
)
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import Scheme
from proofserve.reports import Progress
from proofserve.rounds.records import Workload
from proofserve.verifier.audit.attacks import attacks
from proofserve.verifier.audit.audit import FEWEST, RUNS, Audit, AuditOptions, ConvictionRule, audit
from proofserve.verifier.audit.deployment import PRUNED_EXPERTS, AuditSetup, CheckpointDeployment
from proofserve.verifier.audit.report import AuditReport, page
from proofserve.verifier.calibration_file import (
    NETWORK_P_MISMATCH,
    CalibrationFile,
    GivenThreshold,
    checkpoint_shape,
    threshold_of,
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


class AuditCommandOptions(RecomputationOptions, ThresholdOptions, PlanOptions, PageOptions):
    model: Annotated[str, typer.Argument()] = Field(
        description=f"The deployed model: {', '.join(NAMES)}, or a checkpoint's folder."
    )
    size: Size = "small"
    alpha: float = ALPHA
    """Chance to convict an honest node."""
    power: float = 0.999
    """Required chance to convict a cheat."""
    max_nonces: int = Field(1000, ge=1)
    """Most nonces that a validator recomputes."""
    nonces: int | None = Field(
        None, ge=FEWEST, description=f"Nonces per prover; {NONCES}, or {QUICK_NONCES} with --quick."
    )
    verifications: int = Field(RUNS, ge=1)
    """Simulated of each prover."""
    quick: Annotated[bool, typer.Option("--quick")] = Field(
        False, description=f"Fewer nonces; of the bank {', '.join(QUICK_BANK)}."
    )
    other: Path | None = None
    """Another, also a smaller, checkpoint of this hidden size; else random."""
    seq_len: int = Field(SEQ_LEN, ge=2)
    """Tokens per nonce."""
    k_dim: int | None = Field(
        None,
        ge=1,
        description=f"Values per vector; {ARTIFACT_K_DIM}, or {SKETCH_K_DIM} of a sketch, if"
        " unset.",
    )
    scheme: str = Field(
        DEFAULT_SCHEME, description=f"{ARTIFACT}, {ARTIFACT_LAYERS}, {' or '.join(SKETCHES)}."
    )
    stronger_rng: bool = False
    """256-bit seeds; with artifact-v1-layers."""
    dtype: str | None = None
    """That is served: bfloat16 or float16; the checkpoint's if unset."""

    def setup(self, folder: Path, known: CalibrationFile | None) -> AuditSetup:
        """That of the checkpoint in ``folder``, whose honest nodes are ``known``."""
        if known is not None and self.dtype is not None:
            known.require_served(self.dtype, known.kv_dtype)
        k_dim = self.k_dim or default_k_dim(self.scheme)
        return AuditSetup(
            folder,
            self.device,
            self.suspect,
            self.dtype,
            scheme=vector_scheme(self.scheme, k_dim, self.stronger_rng),
            seq_len=self.seq_len,
            forward_batch=self.forward_batch,
            other=self.other,
            bank=QUICK_BANK if self.quick else None,
        ).serving_as(known)

    def auditing(self, threshold: CalibrationFile | GivenThreshold | None) -> AuditOptions:
        rate = threshold.p_mismatch if threshold else self.p_mismatch or NETWORK_P_MISMATCH
        return AuditOptions(
            ConvictionRule(rate, self.alpha, self.power, self.max_nonces),
            self.nonces or (QUICK_NONCES if self.quick else NONCES),
            threshold.honest if isinstance(threshold, CalibrationFile) else None,
            threshold.dist_threshold if threshold else None,
            self.verifications,
            price=not self.quick,
        )


@verdict_command(app, "audit")
def audit_model(given: AuditCommandOptions, session: CommandSession) -> int:
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
    deployed = checkpoint_named(given.model, given.size, session.line.step, for_plan=given.plan)
    figures = given.dist_threshold, given.calibration, given.p_mismatch
    threshold = threshold_of(*figures, needed=False)
    known = threshold if isinstance(threshold, CalibrationFile) else None
    setup, auditing = given.setup(deployed.folder, known), given.auditing(threshold)
    work = Workload(setup.scheme, Block("", 0), "", setup.seq_len)
    if given.plan:
        _tell_plan(setup, work, auditing.nonces, session)
        return 0
    session.line.step(f"loading {given.model}")
    deployment = CheckpointDeployment(setup)
    if known is not None:
        shape, digest = checkpoint_shape(deployed.folder), deployment.weights_digest
        known.require(work, [deployed.name], shape, digest, deployment.is_dense)
    found = audit(deployment, auditing, session.line)
    beside = _other_routing(deployment, setup.scheme, auditing, session.line)
    honest = known.origin if known else "the kernels emulated in this audit"
    facts = {**_facts(deployed.name, setup, auditing.nonces, began), "honest": honest}
    report = AuditReport(found, deployment.price, facts, machine(), beside)
    session.line.rest("writing the report")
    # First, so that it is not lost if a file cannot be written.
    _show(report, session)
    given.write(report.json())
    given.write_page(lambda: page(report))
    return 0 if found.passed else EXIT_FAILED


def _tell_plan(setup: AuditSetup, work: Workload, nonces: int, session: CommandSession) -> None:
    # Another checkpoint costs what random weights do.
    deployment = CheckpointDeployment(replace(setup, unread=True, other=None))
    cheats = [prover.name for prover in attacks(deployment, 0.0)]

    def passes_of(of: CheckpointValidator) -> list[Pass]:
        bank = deployment.names, of.kernels, of.references
        both = setup.scheme.name in SKETCHES and deployment.mixes_experts
        again = audit_passes(nonces, bank, [*PRUNED_EXPERTS]) if both else []
        return [*audit_passes(nonces, bank, cheats), *again]

    about = f"nonces of each prover, {len(cheats)} of which cheat"
    tell_plan(setup, work, setup.forward_batch, passes_of, about, session)


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


def _show(report: AuditReport, session: CommandSession) -> None:
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
