"""``proofserve calibrate noise``: which threshold tells rounding from fraud."""

import json as json_format
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from proofserve.cli.engines_compared import (
    ComparedEngine,
    Reference,
    RunningNode,
    Saved,
    Task,
    side_of,
)
from proofserve.cli.model import Checkpoint, checkpoint_named
from proofserve.cli.options import ApiKey
from proofserve.cli.session import EXIT_FAILED, CommandSession, open_session
from proofserve.cli.source_options import completed, workload
from proofserve.lab.calibrate.calibration_file import FORMAT, CalibrationFile, checkpoint_shape
from proofserve.lab.calibrate.noise import Noise, Pairs, pairs_of, require_enough
from proofserve.lab.calibrate.noise import noise as noise_of
from proofserve.lab.calibrate.noise_picture import write_noise
from proofserve.lab.calibrate.noise_report import VerificationTrial, noise_report
from proofserve.lab.calibrate.simulation import SimulationPlan, simulate
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.records import Work
from proofserve.lab.report.machine import machine
from proofserve.lab.report.report import Report
from proofserve.lab.verify.claimed import Claimed, to_file
from proofserve.lab.verify.verification import VerificationRule
from proofserve.protocol.sequential import SequentialTest
from proofserve.protocol.statistics import sample_size

ONE, OTHER = "reference:float32", "vllm"
DEFAULT_MODELS = ("qwen", "llama")
# Enough for the default rate of one in a hundred.
NONCES = 400
SEQ_LEN = 64
K_DIM = 12
RUNS = 1000
# What `verify` has as its defaults.
P_FRAUD, ALPHA, BETA = 0.5, 1e-6, 1e-3
# Beyond this a fixed sample, or the patience of a sequential test, helps nobody.
MOST_NONCES = 200


@dataclass(frozen=True, slots=True)
class NoiseResult:
    """What two engines gave with one model."""

    title: str
    found: Noise
    report: Report


def noise(
    *,
    models: Annotated[
        list[str] | None,
        typer.Argument(help="qwen, llama, gemma, or a checkpoint's folder; qwen and llama."),
    ] = None,
    one: Annotated[str, typer.Option(help="An engine, see below.")] = ONE,
    other: Annotated[
        str | None, typer.Option(help="Another; vllm, or with --save none, if unset.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write what --one computed, as `verify` reads it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the threshold, as `verify` and `audit` read it.")
    ] = None,
    size: Annotated[
        str, typer.Option(help="Of our models: tiny (a few MB) or small (about 100M parameters).")
    ] = "small",
    rate: Annotated[
        float,
        typer.Option(help="Share of honest nonces beyond the threshold.", min=1e-6, max=0.1),
    ] = 0.01,
    nonces: Annotated[
        int | None, typer.Option(help=f"{NONCES} if unset, or all of a file.", min=1)
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help=f"Tokens per nonce; {SEQ_LEN}, or the file's.", min=1)
    ] = None,
    k_dim: Annotated[
        int | None, typer.Option(help=f"Values per vector; {K_DIM}, or the file's.", min=1)
    ] = None,
    scheme: Annotated[
        str | None, typer.Option(help="artifact-v1, or artifact-v1-layers, or the file's.")
    ] = None,
    stronger_rng: Annotated[bool, typer.Option(help="With artifact-v1-layers.")] = False,
    api_key: ApiKey = None,
    device: Annotated[str, typer.Option(help="Of a reference engine: cpu or cuda.")] = "cpu",
    forward_batch: Annotated[int, typer.Option(help="Nonces per forward.", min=1)] = 8,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write figures and distances to this file.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw histograms to this file.")] = None,
) -> None:
    """How far are two honest engines apart, and which dist_threshold suits them?

    An engine is reference:float32, reference:bfloat16, vllm or vllm:tp2 (a
    server of ours, bfloat16), a node's URL, or a file of artifacts.

    The threshold is one that --rate of the honest nonces exceed, with its 95 %
    interval whatever their distribution; take a --seq-len like that of your
    rounds. Verifications of the recorded vectors are then simulated, by the
    sequential and by the fixed test: exit code 1 if one of them convicts.

    \b
    proofserve calibrate noise ./model --seq-len 256 --out calibration.json
    proofserve calibrate noise ./model --other http://mine:8000 --out calibration.json
    proofserve calibrate noise --json noise.json --png noise.png
    proofserve calibrate noise qwen --one vllm --save there.json    (on another machine)
    proofserve calibrate noise qwen --other there.json
    """
    with open_session() as desk:
        sides = _sides(one, other, save)
        claimed = completed(_subject(sides, nonces, seq_len, k_dim), seq_len, k_dim, scheme)
        if len(sides) == 2:
            # Too few nonces are refused now rather than after they were computed.
            require_enough(len(claimed.nonces), rate)
        elif json or png or out:
            raise LabError("--json, --png and --out are about two engines; name the --other")
        work, results = workload(claimed, stronger_rng), []
        compared = _models(models, size, sides, save, desk)
        name = _name(compared, sides, api_key) if out else ""
        for model in compared:
            task = Task(work, claimed.nonces, model, device, forward_batch, api_key)
            computed = [side.artifacts(task, desk) for side in sides]
            if save is not None:
                to_file(save, claimed, computed[0])
                desk.console.print(f"artifacts of {sides[0].name} written to {save}")
            if len(sides) == 2:
                pairs = pairs_of(computed[0], computed[1], work.scheme.width)
                results.append(_judge(_title(sides, model), pairs, rate, _setup(task, sides), desk))
        _write(results, json, png, desk)
        if out is not None and results[0].report.passed:
            _calibration(name, task, sides, results[0].found).write(out)
            desk.console.print(f"calibration of {name} written to {out}", soft_wrap=True)
    if not all(result.report.passed for result in results):
        raise typer.Exit(EXIT_FAILED)


def _sides(one: str, other: str | None, save: Path | None) -> list[ComparedEngine]:
    alone = other is None and save is not None
    return [side_of(one)] if alone else [side_of(one), side_of(other or OTHER)]


def _subject(
    sides: Sequence[ComparedEngine], nonces: int | None, seq_len: int | None, k_dim: int | None
) -> Claimed:
    """What to compute: what the files are about, or a block of our own."""
    saved = [side.claimed for side in sides if isinstance(side, Saved)]
    if not saved:
        numbers = tuple(range(nonces or NONCES))
        work = Work("", seq_len=seq_len or SEQ_LEN, k_dim=k_dim or K_DIM)
        return Claimed(
            work.block_hash, work.public_key, numbers, (), k_dim=work.k_dim, seq_len=work.seq_len
        )
    for field in ("block_hash", "public_key", "k_dim", "seq_len", "scheme"):
        if len({getattr(each, field) for each in saved} - {None}) > 1:
            raise LabError(f"the two files differ in {field}")
    return replace(saved[0], nonces=saved[0].nonces[:nonces])


def _models(
    names: Sequence[str] | None,
    size: str,
    sides: Sequence[ComparedEngine],
    save: Path | None,
    desk: CommandSession,
) -> list[Checkpoint | None]:
    """Whose noise to measure: one entry each, None where both sides know what they run."""
    if not any(side.needs_model for side in sides):
        if names:
            raise LabError(f"neither engine computes from {names[0]}; leave it out")
        return [None]
    several = all(side.needs_model for side in sides) and save is None
    if not several and len(names or ()) != 1:
        raise LabError("name the one model that a node, or a file, is about")
    desk.line.step("writing small models, unless they are in the cache")
    return [checkpoint_named(name, size) for name in names or DEFAULT_MODELS]


def _name(
    models: Sequence[Checkpoint | None], sides: Sequence[ComparedEngine], api_key: str | None
) -> str:
    """The model that a calibration is of: as a node serves it, else the checkpoint's name."""
    if len(models) != 1:
        raise LabError("--out is about one model; name it")
    for side in sides:
        if isinstance(side, RunningNode):
            with NodeClient(side.name, api_key) as node:
                return node.models()[0]
    if models[0] is None:
        raise LabError("--out: the files do not say of which model they are; compare an engine")
    return models[0].name


def _calibration(
    name: str, task: Task, sides: Sequence[ComparedEngine], found: Noise
) -> CalibrationFile:
    """What was measured, for a file. Raises LabError if there was no noise to measure."""
    if not found.dist_threshold:
        raise LabError("the engines gave the same vectors, which measures no noise; name another")
    dtypes = [side.dtype for side in sides if isinstance(side, Reference)]
    scheme = task.work.scheme.to_wire()
    return CalibrationFile(
        format=FORMAT,
        version=1,
        model=name,
        shape=checkpoint_shape(task.model.folder) if task.model else None,
        scheme=str(scheme["name"]),
        stronger_rng=bool(scheme["stronger_rng"]),
        seq_len=task.work.seq_len,
        k_dim=task.work.scheme.width,
        dtype=dtypes[0] if dtypes else None,
        engines=(sides[0].name, sides[1].name),
        nonces=len(task.nonces),
        quantiles=found.quantiles,
        dist_threshold=found.dist_threshold,
        p_mismatch=found.rate,
        p_mismatch_interval=found.rate_interval,
    )


def _title(sides: Sequence[ComparedEngine], model: Checkpoint | None) -> str:
    pair = " against ".join(side.name for side in sides)
    return f"{model.name}: {pair}" if model is not None else pair


def _setup(task: Task, sides: Sequence[ComparedEngine]) -> dict[str, Any]:
    return {
        "model": task.model.name if task.model is not None else None,
        "one": sides[0].name,
        "other": sides[1].name,
        "nonces": len(task.nonces),
        "seq_len": task.work.seq_len,
        "scheme": task.work.scheme.to_wire(),
        "device": task.device,
        "forward_batch": task.forward_batch,
    }


def _judge(
    title: str, pairs: Pairs, rate: float, setup: Mapping[str, Any], desk: CommandSession
) -> NoiseResult:
    """Find the threshold, see whether it convicts anybody honest, and show both."""
    found = noise_of(pairs.distances, rate)
    test = SequentialTest(rate, P_FRAUD, ALPHA, BETA)
    enough = sample_size(rate, ALPHA, P_FRAUD, 1.0 - BETA, MOST_NONCES) or MOST_NONCES
    trials = []
    for sequential, count in ((True, MOST_NONCES), (False, enough)):
        # At the quantile they differ as often as the test allows them to.
        rule = VerificationRule(test, found.quantile, sequential)
        kind = "sequential" if sequential else "fixed"
        desk.line.step(f"{title}: simulating verifications, {kind}", RUNS)
        plan = SimulationPlan(RUNS, count)
        with desk.interrupts.allowed():
            trials.append(VerificationTrial(rule, plan, simulate(pairs, rule, plan, desk.line)))
    report = noise_report(f"noise of {title}", found, tuple(trials), setup, machine())
    desk.console.print(report.table())
    return NoiseResult(title, found, report)


def _write(
    results: Sequence[NoiseResult], json: Path | None, png: Path | None, desk: CommandSession
) -> None:
    """Write the files that were asked for, each about every model."""
    if json is not None:
        reports = {result.title: result.report.json() for result in results}
        passed = all(result.report.passed for result in results)
        text = json_format.dumps({"passed": passed, "pairs": reports}, indent=2)
        json.write_text(text + "\n", encoding="utf-8")
        desk.console.print(f"figures written to {json}")
    if png is not None:
        write_noise({result.title: result.found for result in results}, png)
        desk.console.print(f"histograms drawn to {png}")
