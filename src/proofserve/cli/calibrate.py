"""``proofserve calibrate``: finds parameters that suit a deployed model."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from proofserve.cli.chat.calibrate import chat
from proofserve.cli.model import SmallModel, checkpoint, independent
from proofserve.cli.noise import noise
from proofserve.cli.options import (
    SEVERAL,
    ApiKey,
    Json,
    Models,
    Name,
    Png,
    SeqLen,
    Size,
    Url,
    chosen,
)
from proofserve.cli.servers import ServedModel, ServerOptions, own_model, running_model
from proofserve.cli.session import EXIT_FAILED, CommandSession, open_session
from proofserve.lab.calibrate.distances import METHODS, Sample, collect
from proofserve.lab.calibrate.histogram import write_histograms
from proofserve.lab.calibrate.target import calibrate, interval_ranks
from proofserve.lab.calibrate.target_report import Outcome, rates_table, report_of
from proofserve.lab.report.json_files import write_json
from proofserve.lab.report.machine import machine
from proofserve.lab.report.report import Report

app = typer.Typer(help="Find the parameters that suit a model.", no_args_is_help=True)

DEFAULT_MODELS = ["qwen", "llama"]
FORWARD_BATCH = 96
# Also a multiple of a node's default of 32 nonces per forward.
BATCH_SIZE = 96
# Seven whole batches for each of three keys: no forward has padding nonces.
NONCES = 2016
# Tokens. A few are enough, because a distance is as random as after many.
SEQ_LEN = 8


# For each model: the distances of each method, and their figures.
Results = Mapping[str, Sequence[tuple[Outcome, Report]]]


app.command("noise")(noise)
app.command("chat")(chat)


@app.command("r-target", context_settings=SEVERAL)
def r_target(
    ctx: typer.Context,
    *,
    models: Models = None,
    size: Size = "small",
    url: Url = None,
    api_key: ApiKey = None,
    model: Name = None,
    nonces: Annotated[
        int, typer.Option(help="Nonces per block and method, split over the keys.", min=1)
    ] = NONCES,
    blocks: Annotated[int, typer.Option(help="Block hashes.", min=2)] = 3,
    keys: Annotated[int, typer.Option(help="Public keys.", min=1)] = 3,
    rate: Annotated[
        float, typer.Option(help="Wanted share of winners.", min=0.0001, max=0.9999)
    ] = 0.10,
    seq_len: SeqLen = SEQ_LEN,
    json: Json = None,
    png: Png = None,
) -> None:
    """Find the r_target at which one nonce in ten wins, and compare blocks.

    Computes distances with sign flips and with layer hooks. With sign flips
    one target has to suit every block: the winner rates of the blocks may
    differ by at most 2 percentage points more than chance explains.

    Part of the difference is real: the share of a block's target that lies in
    the space of the hidden states varies by 1/sqrt(2 * hidden size). At a rate
    of 0.10 this moves a block by 1.0 points on tiny and by 0.6 on small, so
    small is the default.

    \b
    proofserve calibrate r-target --json figures.json --png distances.png
    proofserve calibrate r-target --models qwen --rate 0.58
    proofserve calibrate r-target --url http://127.0.0.1:8000   (no round may run there)
    """
    names = chosen(ctx, models, url, DEFAULT_MODELS)
    ours = [independent(SmallModel(name, size)) for name in names]
    sample = Sample(nonces, blocks, keys, seq_len, BATCH_SIZE)
    with open_session() as session:
        # Too few nonces are refused before anything is computed.
        interval_ranks(sample.total, rate)
        if url:
            measured = [running_model(url, api_key, model, session)]
        else:
            measured = _small_models(ours, session)
        results = {each.name: _measure(each, sample, rate, session) for each in measured}
        _write(results, json, png, session)
    if not _passed(results):
        raise typer.Exit(EXIT_FAILED)


def _small_models(models: Sequence[SmallModel], session: CommandSession) -> list[ServedModel]:
    """Writes all checkpoints first, so that an unknown model is refused before a measurement."""
    deployments = [ServerOptions(checkpoint(model), model.name, FORWARD_BATCH) for model in models]
    return [own_model(each, session) for each in deployments]


def _measure(
    model: ServedModel, sample: Sample, rate: float, session: CommandSession
) -> list[tuple[Outcome, Report]]:
    results = []
    with model.start() as node:
        where = {**machine(), **node.versions()}
        for method in METHODS:
            began = time.monotonic()
            distances = collect(node, model.name, method, sample, session.line)
            seconds = time.monotonic() - began
            outcome = Outcome(model.name, method, sample, rate, calibrate(distances, rate), seconds)
            results.append((outcome, report_of(outcome, where)))
    for _, report in results:
        session.console.print(report.table())
    session.console.print(rates_table([outcome for outcome, _ in results]))
    return results


def _write(results: Results, json: Path | None, png: Path | None, session: CommandSession) -> None:
    if json is not None:
        models = {
            model: {outcome.method: report.json() for outcome, report in found}
            for model, found in results.items()
        }
        write_json(json, {"passed": _passed(results), "models": models})
        session.console.print(f"figures written to {json}")
    if png is not None:
        panels = {
            model: {outcome.title: outcome.found for outcome, _ in found}
            for model, found in results.items()
        }
        write_histograms(panels, png)
        session.console.print(f"histograms drawn to {png}")


def _passed(results: Results) -> bool:
    return all(report.passed for found in results.values() for _, report in found)
