"""``proofserve calibrate noise``: measures what honest nodes look like."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from pydantic import Field
from rich.table import Column, Table

from proofserve.cli import recompute
from proofserve.cli.command import ApiKey, Png, Size
from proofserve.cli.model import NAMES, Checkpoint, checkpoint_named
from proofserve.cli.servers import ServerOptions, running_engine, vllm_ranks
from proofserve.cli.session import CommandSession
from proofserve.cli.validator.options import PlanOptions, RecomputationOptions, ReportOptions
from proofserve.client.judging import proof_validator, validator_setup
from proofserve.host import machine
from proofserve.protocol import DEFAULT_SCHEME, SEQ_LEN, SKETCH_2
from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.records import BLOCK_HEIGHT, Work, vectors_of
from proofserve.reports import ReportedError, write_json
from proofserve.rounds.computation import chunks
from proofserve.rounds.records import Workload
from proofserve.verifier.calibration_file import (
    CalibrationFile,
    KernelFacts,
    checkpoint_shape,
    merged,
)
from proofserve.verifier.claims import (
    ClaimedArtifacts,
    Selection,
    document,
    kernel_facts,
    read_file,
)
from proofserve.verifier.judges import Vectors
from proofserve.verifier.nodes.sources import is_url
from proofserve.verifier.noise import (
    VERIFICATIONS,
    MeasuringPlan,
    checked,
    honest_runs,
    left_out_lines,
    measured_calibration,
    require_explained,
)
from proofserve.verifier.orders import WorkOptions, order_for, order_of, workload_of
from proofserve.verifier.populations import nearest
from proofserve.verifier.target import write_noise
from proofserve.wiring.experts import config_of, has_experts

if TYPE_CHECKING:
    from proofserve.verifier.plans import Pass
    from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup

NONCES, EMULATED = 32, 16
# With eight nonces of 12 values, weights in int8 that were measured as honest went unnoticed.
BANK = 24
ENGINES = "vllm, vllm:tp2, a node's URL, or a file of `calibrate noise --save`"
# Nonces in one call and in one step of the progress line.
AT_ONCE = 32

# What an engine ran on, and an artifact for each nonce.
EngineRun = tuple[KernelFacts, Sequence[Claim]]


class NoiseOptions(RecomputationOptions, PlanOptions, ReportOptions):
    model: Annotated[str, typer.Argument()] = Field(
        description=f"The published checkpoint: a folder, {', '.join(NAMES)}."
    )
    other: tuple[str, ...] = ()
    """An honest engine, repeat it for several: vllm or vllm:tp2 (a server that this command
    starts), a node's URL, or a file that --save wrote."""
    trust: tuple[str, ...] = ()
    """A measured node, by its name, to take for honest although the emulated kernels alone would
    convict it. Repeat it."""
    add: tuple[Path, ...] = ()
    """A calibration of another machine; its kernels join. Repeat it."""
    save: Path | None = None
    """Only write what the one --other computed, to measure it elsewhere."""
    out: Path | None = None
    """Write the calibration, as `verify` and `audit` read it."""
    size: Size = "small"
    nonces: int | None = Field(
        None, ge=16, description=f"Of each engine; {NONCES}, or all of a file."
    )
    emulated: int = Field(EMULATED, ge=16)
    """Nonces of each emulated kernel."""
    bank: int = Field(BANK, ge=0)
    """Nonces on which suspects are measured; 0 for none."""
    seq_len: int | None = Field(
        None, ge=1, description=f"Tokens per nonce; {SEQ_LEN}, or the file's."
    )
    k_dim: int | None = Field(None, ge=1)
    """Values per vector; 64 of sketches, else 12."""
    scheme: str | None = Field(
        None, description=f"{DEFAULT_SCHEME} if unset, as a round's; of a mixture only {SKETCH_2}."
    )
    kv_cache: str = "auto"
    """What nodes may keep keys and values in: auto, or also fp8."""
    verifications: int = Field(VERIFICATIONS, ge=1)
    """Simulated of each kernel that is left out."""
    stronger_rng: bool = False
    """256-bit seeds; with artifact-v1-layers."""
    api_key: ApiKey = None
    png: Png = None


def noise(given: NoiseOptions, session: CommandSession) -> None:
    """Measure what honest nodes of a model look like, for `verify` and `audit`.

    A node is honest if it is like one of the kernels measured here. Kernels of
    other machines are emulated, so that no card is needed to begin with; give
    every honest engine that you trust as --other: each kind of card, each number
    of ranks. Other machines --save what theirs computed, or write a calibration
    of their own, which --add merges. All compute the same nonces.

    A node that the emulated kernels alone would convict is refused: it may serve
    other weights. --trust takes it all the same. At the end each kernel is left
    out in turn: the others must not convict it. If they would, verdicts get wider
    margins, and the output says so.

    A calibration holds for one model, its weights, dtype and KV cache, and one
    scheme, --seq-len and --k-dim: those of your rounds.

    \b
    proofserve calibrate noise ./model --plan
    proofserve calibrate noise ./model --out calibration.json
    proofserve calibrate noise ./model --other http://a100:8000 --other http://h100:8000
        --out calibration.json
    proofserve calibrate noise ./model --other vllm --save h200.json       (on the other machine)
    proofserve calibrate noise ./model --other h200.json --add calibration.json --out both.json
    """
    engines = [(name, _saved_run(name)) for name in given.other]
    added = [CalibrationFile.read(file) for file in given.add]
    claimed = _to_compute([saved for _, saved in engines if saved is not None], given.nonces)
    # Files say it; else this command has a default.
    tokens = given.seq_len if claimed.claims else given.seq_len or SEQ_LEN
    session.line.step("writing a small model, unless it is in the cache")
    checkpoint = checkpoint_named(given.model, given.size, session.line.step, for_plan=given.plan)
    named = _scheme_for(checkpoint, given.scheme, claimed.scheme)
    asked = WorkOptions(named, given.k_dim, tokens, None, given.stronger_rng)
    order = order_of(claimed, asked)
    recompute.warn_of_few_values(order, session)
    work = workload_of(order)
    measuring = MeasuringPlan(claimed.nonces, given.emulated, given.bank)
    how = given.device, given.suspect, None, given.kv_cache
    setup = validator_setup(checkpoint.folder, *how)
    if given.plan:
        _tell_plan(setup, work, given.forward_batch, measuring, session)
        return
    runs = [_run(*each, given, (work, claimed.nonces), checkpoint, session) for each in engines]
    if given.save is not None:
        _save(given.save, work, runs, session)
        return
    validator = proof_validator(setup, work, given.forward_batch, session.line.layer)
    sent = [_sent(work, claimed.nonces, *run) for run in runs]
    measured = honest_runs(sent, validator.truth(claimed.nonces))
    about = _about(work, checkpoint, given.kv_cache)
    made = measured_calibration(validator, measured, measuring, about, session.line)
    for each in added:
        made = merged(made, each)
    require_explained(made, given.trust, given.verifications)
    made = checked(made, session.line, given.verifications)
    session.console.print(_table(made))
    for line in left_out_lines(made.left_out):
        session.console.print(line, soft_wrap=True)
    _write(made, given, session)


def _scheme_for(checkpoint: Checkpoint, asked: str | None, said: str | None) -> str | None:
    """The scheme that is ``asked`` for, or else that of a mixture; None for the default one.

    Raises ReportedError for one that clears no honest node of a mixture; ``said`` is that of files.
    """
    config = config_of(str(checkpoint.folder))
    if config is None or not has_experts(config):
        return asked
    if (found := asked or said or SKETCH_2) != SKETCH_2:
        raise ReportedError(
            f"--scheme {found}: a mixture chooses its experts itself there, and rounding changes"
            f" some, so no honest node is cleared by it; have rounds of {SKETCH_2}"
        )
    return found


def _write(made: CalibrationFile, given: NoiseOptions, session: CommandSession) -> None:
    if given.json_file is not None:
        given.write({**made.model_dump(), "machine": machine()})
        session.console.print(f"figures written to {given.json_file}")
    if given.png is not None:
        write_noise(made, given.png)
        session.console.print(f"histograms drawn to {given.png}")
    if given.out is not None:
        made.write(given.out)
        written = f"calibration of {made.model} written to {given.out}"
        session.console.print(written, soft_wrap=True)


def _tell_plan(
    setup: "ValidatorSetup",
    work: Workload,
    forward_batch: int,
    measuring: MeasuringPlan,
    session: CommandSession,
) -> None:
    from proofserve.verifier.plans import measuring_passes  # noqa: PLC0415 - imports torch

    def passes_of(of: "CheckpointValidator") -> Sequence["Pass"]:
        return measuring_passes(measuring, (of.names, of.kernels, of.references))

    about = "nonces for our own run, without the engines of --other"
    recompute.tell_plan(setup, work, forward_batch, passes_of, about, session)


def _to_compute(saved: Sequence[ClaimedArtifacts], nonces: int | None) -> ClaimedArtifacts:
    ours = Work("")
    if not saved:
        numbers = tuple(range(nonces or NONCES))
        return ClaimedArtifacts(
            ours.block_hash, ours.public_key, numbers, (), block_height=BLOCK_HEIGHT
        )
    for field in ("block_hash", "block_height", "public_key", "width", "seq_len", "scheme"):
        if len({getattr(each, field) for each in saved} - {None}) > 1:
            raise ReportedError(f"the files of --other differ in {field}")
    common = set.intersection(*({*each.nonces} for each in saved))
    kept = tuple(nonce for nonce in saved[0].nonces if nonce in common)[:nonces]
    return replace(saved[0], nonces=kept)


def _saved_run(name: str) -> ClaimedArtifacts | None:
    """What the engine ``name`` computed, if that is a file; None for a vLLM or a node's URL.

    Raises ReportedError for any other name, and for a file without artifacts.
    """
    if is_url(name) or vllm_ranks(name) is not None:
        return None
    if not Path(name).is_file():
        raise ReportedError(f"{name!r} is not an engine and not a file; choose from {ENGINES}")
    return read_file(Path(name), Selection())


def _run(
    name: str,
    saved: ClaimedArtifacts | None,
    given: NoiseOptions,
    asked: tuple[Workload, Sequence[int]],
    model: Checkpoint,
    session: CommandSession,
) -> EngineRun:
    """What the engine ``name`` computes, or has ``saved``, of the work and nonces ``asked``."""
    work, nonces = asked
    if saved is not None:
        kept = [claim for claim in saved.claims if claim.nonce in {*nonces}]
        facts = kernel_facts(name, {}) if saved.ran_on is None else saved.ran_on
        return KernelFacts.model_validate(facts), kept
    served = ServerOptions(model.folder, model.name, given.forward_batch, scheme=work.scheme.name)
    with running_engine(name, served, given.api_key, session) as node:
        facts = kernel_facts("a node", node.kernels())
        compute, calls = recompute.by_node(work, node), chunks(nonces, AT_ONCE)
        steps = session.line.over(f"{name}: {len(nonces)} nonces", calls)
        claims = [claim for some in steps for claim in compute(some)]
    return KernelFacts.model_validate(facts), claims


def _save(file: Path, work: Workload, runs: Sequence[EngineRun], session: CommandSession) -> None:
    if len(runs) != 1:
        raise ReportedError("--save writes what one engine computed: give --other once")
    facts, claims = runs[0]
    write_json(file, document(order_for(work), claims, facts.model_dump()))
    session.console.print(f"artifacts of {facts.name} written to {file}", soft_wrap=True)


def _sent(
    work: Workload, nonces: Sequence[int], facts: KernelFacts, claims: Sequence[Claim]
) -> tuple[KernelFacts, Vectors]:
    vectors = vectors_of(claims, work.scheme.width)
    if missing := [nonce for nonce in nonces if nonce not in vectors]:
        raise ReportedError(f"{facts.name} has no vector of nonce {missing[0]}")
    return facts, {nonce: vectors[nonce] for nonce in nonces}


def _about(work: Workload, model: Checkpoint, kv_dtype: str) -> dict[str, object]:
    order = order_for(work)
    return {
        **{"model": model.name, "shape": checkpoint_shape(model.folder), "kv_dtype": kv_dtype},
        **{"scheme": order.scheme, "stronger_rng": order.stronger_rng, "seq_len": order.seq_len},
        **{"k_dim": order.k_dim, "block_hash": order.block_hash, "public_key": order.public_key},
    }


def _table(made: CalibrationFile) -> Table:
    """A row for each population: how long its errors are, and how like those of a reference."""
    right = (Column(name, justify="right") for name in ("nonces", "size", "footprint"))
    table = Table("honest kernel", "", *right, "of", title=made.model, title_justify="left")
    for fields in made.populations:
        run, name = fields.figures.figures, fields.facts.name
        others = [each for each in made.references if each != name]
        reference = nearest(run, others or made.references)
        ratios = run.lengths / made.own(reference).lengths[run.rows]
        table.add_row(
            name,
            "emulated" if fields.facts.emulated else "measured",
            str(len(run.lengths)),
            f"{np.median(ratios):.2f}",
            f"{run.footprints[reference].mean():.2f}",
            reference,
        )
    table.caption = "size: of errors over the reference's; footprint: cosine of the two (means)"
    return table
