"""``proofserve calibrate noise``: finds a threshold between rounding and fraud."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from proofserve.cli.model import TRAINED, Checkpoint, checkpoint_named
from proofserve.cli.options import (
    ApiKey,
    Device,
    ForwardBatch,
    Json,
    KDim,
    Png,
    Size,
    StrongerRng,
    Suspects,
)
from proofserve.cli.recompute import (
    ComparedEngine,
    ComparisonTask,
    engine_named,
    figures_of_checkpoint,
)
from proofserve.cli.session import EXIT_FAILED, CommandSession, open_session
from proofserve.lab.calibrate.calibration_file import (
    FORMAT,
    CalibrationFile,
    checkpoint_shape,
    fit_of,
    suspects_of,
)
from proofserve.lab.calibrate.checkpoint_figures import CheckpointFigures
from proofserve.lab.calibrate.histogram import write_noise
from proofserve.lab.calibrate.noise import Noise, pairs_of, require_enough
from proofserve.lab.calibrate.noise import noise as noise_of
from proofserve.lab.calibrate.noise_report import noise_report
from proofserve.lab.calibrate.simulation import simulated_trials
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.records import BLOCK_HEIGHT, Work
from proofserve.lab.report.json_files import write_json
from proofserve.lab.report.machine import machine
from proofserve.lab.report.report import Report
from proofserve.lab.verify.claimed import ClaimedArtifacts, WorkOptions, to_file, workload
from proofserve.protocol import ARTIFACT_LAYERS, DEFAULT_SCHEME, SEQ_LEN, SKETCH, default_k_dim
from proofserve.protocol.verdict.comparison import Claim

ONE, OTHER = "reference:float32", "vllm"
DEFAULT_MODELS = (TRAINED, "qwen")
# Enough for the default rate of one in a hundred.
NONCES = 400


@dataclass(frozen=True, slots=True)
class NoiseResult:
    title: str
    found: Noise
    report: Report


def noise(
    *,
    models: Annotated[
        list[str] | None,
        typer.Argument(help="trained, qwen, llama, gemma, or a folder; trained and qwen if unset."),
    ] = None,
    one: Annotated[str, typer.Option(help="The first engine, see below.")] = ONE,
    other: Annotated[
        str | None, typer.Option(help="The second; vllm if unset, or with --save none.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write what --one computed, as `verify` reads it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the threshold, as `verify` and `audit` read it.")
    ] = None,
    size: Size = "small",
    rate: Annotated[
        float, typer.Option(help="Share of honest nonces beyond the threshold.", min=1e-6, max=0.1)
    ] = 0.01,
    nonces: Annotated[
        int | None, typer.Option(help=f"{NONCES}, or all of a file, if unset.", min=1)
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help=f"Tokens per nonce; {SEQ_LEN}, or the file's.", min=1)
    ] = None,
    k_dim: KDim = None,
    scheme: Annotated[
        str | None, typer.Option(help=f"{DEFAULT_SCHEME} if unset; {ARTIFACT_LAYERS}, or {SKETCH}.")
    ] = None,
    bank: Annotated[
        int, typer.Option(help="Nonces on which --out measures the suspects; 0 for none.", min=0)
    ] = 128,
    suspect: Suspects = None,
    stronger_rng: StrongerRng = False,
    api_key: ApiKey = None,
    device: Device = "cpu",
    forward_batch: ForwardBatch = 8,
    json: Json = None,
    png: Png = None,
) -> None:
    """Measure the distances of two honest engines, and choose a dist_threshold.

    An engine is reference:float32, reference:bfloat16, vllm or vllm:tp2 (a
    server that this command starts, in bfloat16), a node's URL, or a file of
    artifacts. Give --scheme, --seq-len and --k-dim of your rounds, if they
    are not the defaults.

    A share of --rate of the honest nonces exceeds the threshold. Its 95 %
    interval holds for any distribution. The command then simulates
    verifications with both forms of the count: exit code 1 if one convicts.

    --out also writes all distances, for the scale test. If one engine is
    reference:float32, it writes how large they are beside the validator's own
    rounding, for the paired test, and how the honest errors lie to those of
    suspected weights, for the direction test. 1,000 nonces carry any --alpha
    of `verify`, n fewer ones an alpha of 1/n.

    \b
    proofserve calibrate noise ./model --out calibration.json
    proofserve calibrate noise ./model --other http://mine:8000 --out calibration.json
    proofserve calibrate noise --json noise.json --png noise.png
    proofserve calibrate noise qwen --one vllm --save there.json    (on another machine)
    proofserve calibrate noise qwen --other there.json
    """
    with open_session() as session:
        alone = other is None and save is not None
        engines = [engine_named(name) for name in ([one] if alone else [one, other or OTHER])]
        claimed = _to_compute(engines, nonces)
        given = _completed(WorkOptions(scheme, k_dim, seq_len, None, stronger_rng), claimed)
        work, results = workload(claimed, given), []
        if not alone:
            # Too few nonces are refused before anything is computed.
            require_enough(len(claimed.nonces), rate)
        elif json or png or out:
            raise LabError("--json, --png and --out need a second engine: give --other")
        compared = _models(models, size, engines, save, session)
        name = _name(compared, engines, api_key) if out else ""
        for model in compared:
            task = ComparisonTask(work, claimed.nonces, model, device, forward_batch, api_key)
            computed = [engine.artifacts(task, session) for engine in engines]
            if save is not None:
                to_file(save, work, computed[0])
                session.console.print(f"artifacts of {one} written to {save}")
            if not alone:
                results.append(_measure(task, engines, computed, rate, session))
        _write(results, json, png, session)
        if out is not None and results[0].report.passed:
            others = tuple(suspect or ())
            ours = figures_of_checkpoint(task, engines, computed, bank, others, session)
            _calibration(name, task, engines, results[0].found, ours).write(out)
            session.console.print(f"calibration of {name} written to {out}", soft_wrap=True)
    if not all(result.report.passed for result in results):
        raise typer.Exit(EXIT_FAILED)


def _to_compute(engines: Sequence[ComparedEngine], nonces: int | None) -> ClaimedArtifacts:
    saved = [engine.claimed for engine in engines if engine.claimed is not None]
    if not saved:
        numbers = tuple(range(nonces or NONCES))
        ours = Work("")
        return ClaimedArtifacts(
            ours.block_hash, ours.public_key, numbers, (), block_height=BLOCK_HEIGHT
        )
    for field in ("block_hash", "block_height", "public_key", "width", "seq_len", "scheme"):
        if len({getattr(each, field) for each in saved} - {None}) > 1:
            raise LabError(f"the two files differ in {field}")
    return replace(saved[0], nonces=saved[0].nonces[:nonces])


def _completed(given: WorkOptions, claimed: ClaimedArtifacts) -> WorkOptions:
    """``given`` with the defaults of this command for what neither it nor a file says."""
    if claimed.claims:
        return given
    scheme = given.scheme or DEFAULT_SCHEME
    k_dim = given.k_dim or default_k_dim(scheme)
    return replace(given, scheme=scheme, k_dim=k_dim, seq_len=given.seq_len or SEQ_LEN)


def _models(
    names: Sequence[str] | None,
    size: str,
    engines: Sequence[ComparedEngine],
    save: Path | None,
    session: CommandSession,
) -> list[Checkpoint | None]:
    """The models to measure; [None] if neither engine needs one."""
    if not any(engine.needs_model for engine in engines):
        if names:
            raise LabError(f"no engine needs a model here: leave out {names[0]}")
        return [None]
    several = all(engine.needs_model for engine in engines) and save is None
    if not several and len(names or ()) != 1:
        raise LabError("give the one model of the node, or of the file")
    session.line.step("writing small models, unless they are in the cache")
    return [checkpoint_named(name, size) for name in names or DEFAULT_MODELS]


def _name(
    models: Sequence[Checkpoint | None], engines: Sequence[ComparedEngine], api_key: str | None
) -> str:
    """The name of the calibrated model: as a node serves it, else the checkpoint's."""
    if len(models) != 1:
        raise LabError("--out needs exactly one model: name it")
    for engine in engines:
        if engine.url is not None:
            with NodeClient(engine.url, api_key) as node:
                return node.models()[0]
    if models[0] is None:
        raise LabError("--out: a file does not name its model; give an engine as --one or --other")
    return models[0].name


def _calibration(
    name: str,
    task: ComparisonTask,
    engines: Sequence[ComparedEngine],
    found: Noise,
    ours: CheckpointFigures,
) -> CalibrationFile:
    """The measured threshold for a file. Raises LabError if all distances are 0."""
    if not found.distances.all():
        raise LabError("some vectors of the engines are equal: without noise there is no threshold")
    scheme = task.work.scheme.to_wire()
    return CalibrationFile(
        format=FORMAT,
        version=2,
        model=name,
        shape=checkpoint_shape(task.model.folder) if task.model else None,
        scheme=str(scheme["name"]),
        stronger_rng=bool(scheme.get("stronger_rng", False)),
        seq_len=task.work.seq_len,
        k_dim=int(scheme["k_dim"]),
        dtype=engines[0].dtype or engines[1].dtype,
        engines=(engines[0].name, engines[1].name),
        quantiles=found.quantiles,
        dist_threshold=found.dist_threshold,
        p_mismatch=found.rate,
        p_mismatch_interval=found.rate_interval,
        distances=found.distances.tolist(),
        fit=fit_of(found.distances),
        paired=None if ours.ratios is None else fit_of(ours.ratios),
        suspects=suspects_of(ours.suspects),
    )


def _measure(
    task: ComparisonTask,
    engines: Sequence[ComparedEngine],
    computed: Sequence[Sequence[Claim]],
    rate: float,
    session: CommandSession,
) -> NoiseResult:
    one, other = engines
    setup = {
        "model": task.model.name if task.model is not None else None,
        "one": one.name,
        "other": other.name,
        "nonces": len(task.nonces),
        "seq_len": task.work.seq_len,
        "scheme": task.work.scheme.to_wire(),
        "device": task.device,
        "forward_batch": task.forward_batch,
    }
    of_model = f"{task.model.name}: " if task.model is not None else ""
    title = f"{of_model}{one.name} against {other.name}"
    pairs = pairs_of(computed[0], computed[1], task.work.scheme.width)
    found = noise_of(pairs.distances, rate)
    with session.interrupts.allowed():
        trials = simulated_trials(title, pairs, found, session.line)
    report = noise_report(f"noise of {title}", found, trials, setup, machine())
    session.console.print(report.table())
    return NoiseResult(title, found, report)


def _write(
    results: Sequence[NoiseResult], json: Path | None, png: Path | None, session: CommandSession
) -> None:
    if json is not None:
        reports = {result.title: result.report.json() for result in results}
        passed = all(result.report.passed for result in results)
        write_json(json, {"passed": passed, "pairs": reports})
        session.console.print(f"figures written to {json}")
    if png is not None:
        write_noise({result.title: result.found for result in results}, png)
        session.console.print(f"histograms drawn to {png}")
