"""``proofserve calibrate noise``: measures what honest nodes look like."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.table import Column, Table

from proofserve.cli import options, recompute
from proofserve.cli.model import NAMES, Checkpoint, checkpoint_named
from proofserve.cli.session import CommandSession, open_session
from proofserve.cli.validator.plans import tell_plan
from proofserve.client.checkpoint import proof_validator, validator_setup
from proofserve.host import machine
from proofserve.protocol import DEFAULT_SCHEME, SEQ_LEN, SKETCH_2
from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.records import BLOCK_HEIGHT, Work, vectors_of
from proofserve.reports import ReportedError, write_json
from proofserve.rounds.records import Workload
from proofserve.verifier.calibration_file import (
    CalibrationFile,
    KernelFacts,
    checkpoint_shape,
    merged,
)
from proofserve.verifier.claims import ClaimedArtifacts, document
from proofserve.verifier.judges import Vectors
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


def noise(
    *,
    model: Annotated[
        str, typer.Argument(help=f"The published checkpoint: a folder, {', '.join(NAMES)}.")
    ],
    other: Annotated[
        list[str] | None,
        typer.Option(
            help="An honest engine, repeat it for several: vllm or vllm:tp2 (a server that this"
            " command starts), a node's URL, or a file that --save wrote."
        ),
    ] = None,
    trust: Annotated[
        list[str] | None,
        typer.Option(
            help="A measured node, by its name, to take for honest although the emulated kernels"
            " alone would convict it. Repeat it."
        ),
    ] = None,
    add: Annotated[
        list[Path] | None,
        typer.Option(help="A calibration of another machine; its kernels join. Repeat it."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Only write what the one --other computed, to measure it elsewhere."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the calibration, as `verify` and `audit` read it.")
    ] = None,
    size: options.Size = "small",
    nonces: Annotated[
        int | None, typer.Option(help=f"Of each engine; {NONCES}, or all of a file.", min=16)
    ] = None,
    emulated: Annotated[
        int, typer.Option(help="Nonces of each emulated kernel.", min=16)
    ] = EMULATED,
    bank: Annotated[
        int, typer.Option(help="Nonces on which suspects are measured; 0 for none.", min=0)
    ] = BANK,
    seq_len: Annotated[
        int | None, typer.Option(help=f"Tokens per nonce; {SEQ_LEN}, or the file's.", min=1)
    ] = None,
    k_dim: Annotated[
        int | None, typer.Option(help="Values per vector; 64 of sketches, else 12.", min=1)
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            help=f"{DEFAULT_SCHEME} if unset, as a round's; of a mixture only {SKETCH_2}."
        ),
    ] = None,
    kv_cache: Annotated[
        str, typer.Option(help="What nodes may keep keys and values in: auto, or also fp8.")
    ] = "auto",
    suspect: options.Suspects = None,
    verifications: options.LeftOut = VERIFICATIONS,
    stronger_rng: options.StrongerRng = False,
    api_key: options.ApiKey = None,
    device: options.Device = "cpu",
    forward_batch: options.ForwardBatch = 8,
    plan: options.Plan = False,
    json: options.Json = None,
    png: options.Png = None,
) -> None:
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
    with open_session() as session:
        engines = [(name, recompute.saved_run(name)) for name in other or ()]
        claimed = _to_compute([saved for _, saved in engines if saved is not None], nonces)
        # Files say it; else this command has a default.
        tokens = seq_len if claimed.claims else seq_len or SEQ_LEN
        session.line.step("writing a small model, unless it is in the cache")
        checkpoint = checkpoint_named(model, size, session.line.step, for_plan=plan)
        named = _scheme_for(checkpoint, scheme, claimed.scheme)
        work = workload_of(order_of(claimed, WorkOptions(named, k_dim, tokens, None, stronger_rng)))
        recompute.warn_of_few_values(work, session)
        measuring = MeasuringPlan(claimed.nonces, emulated, bank)
        if plan:
            setup = validator_setup(checkpoint.folder, device, suspect, kv_dtype=kv_cache)
            _tell_plan(setup, work, forward_batch, measuring, session)
            return
        task = recompute.ComparisonTask(work, claimed.nonces, checkpoint, forward_batch, api_key)
        runs = [recompute.run_engine(*each, task, session) for each in engines]
        if save is not None:
            _save(save, task, runs, session)
            return
        setup = validator_setup(checkpoint.folder, device, suspect, kv_dtype=kv_cache)
        validator = proof_validator(setup, work, forward_batch, session.line.layer)
        with session.interrupts.allowed():
            sent = [_sent(task, *run) for run in runs]
            measured = honest_runs(sent, validator.truth(task.nonces))
            about = _about(task, kv_cache)
            made = measured_calibration(validator, measured, measuring, about, session.line)
            for file in add or ():
                made = merged(made, CalibrationFile.read(file))
            require_explained(made, trust or (), verifications)
            made = checked(made, session.line, verifications)
        session.console.print(_table(made))
        for line in left_out_lines(made.left_out):
            session.console.print(line, soft_wrap=True)
        _write(made, json, png, out, session)


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


def _write(
    made: CalibrationFile,
    json: Path | None,
    png: Path | None,
    out: Path | None,
    session: CommandSession,
) -> None:
    if json is not None:
        write_json(json, {**made.model_dump(), "machine": machine()})
        session.console.print(f"figures written to {json}")
    if png is not None:
        write_noise(made, png)
        session.console.print(f"histograms drawn to {png}")
    if out is not None:
        made.write(out)
        session.console.print(f"calibration of {made.model} written to {out}", soft_wrap=True)


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
    with session.interrupts.allowed():
        tell_plan(setup, work, forward_batch, passes_of, about, session)


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


def _save(
    file: Path,
    task: recompute.ComparisonTask,
    runs: Sequence[recompute.EngineRun],
    session: CommandSession,
) -> None:
    if len(runs) != 1:
        raise ReportedError("--save writes what one engine computed: give --other once")
    facts, claims = runs[0]
    write_json(file, document(order_for(task.work), claims, facts.model_dump()))
    session.console.print(f"artifacts of {facts.name} written to {file}", soft_wrap=True)


def _sent(
    task: recompute.ComparisonTask, facts: KernelFacts, claims: Sequence[Claim]
) -> tuple[KernelFacts, Vectors]:
    vectors = vectors_of(claims, task.work.scheme.width)
    if missing := [nonce for nonce in task.nonces if nonce not in vectors]:
        raise ReportedError(f"{facts.name} has no vector of nonce {missing[0]}")
    return facts, {nonce: vectors[nonce] for nonce in task.nonces}


def _about(task: recompute.ComparisonTask, kv_dtype: str) -> dict[str, object]:
    scheme = task.work.scheme.to_wire()
    return {
        "model": task.model.name,
        "shape": checkpoint_shape(task.model.folder),
        "kv_dtype": kv_dtype,
        "scheme": str(scheme["name"]),
        "stronger_rng": bool(scheme.get("stronger_rng", False)),
        "seq_len": task.work.seq_len,
        "k_dim": int(scheme["k_dim"]),
        "block_hash": task.work.block.hash,
        "public_key": task.work.public_key,
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
