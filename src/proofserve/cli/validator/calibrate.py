"""``proofserve calibrate``: what honest nodes do. ``noise`` is in a module of its own."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from proofserve.cli import servers
from proofserve.cli.command import ApiKey, Json, Name, Png, SeqLen, Size, Url, command
from proofserve.cli.model import (
    SEVERAL,
    Checkpoint,
    ModelArgument,
    Models,
    SmallModel,
    checkpoint,
    checkpoint_named,
    chosen_models,
)
from proofserve.cli.session import EXIT_FAILED, CommandSession, open_session
from proofserve.cli.validator.noise import noise
from proofserve.cli.validator.options import CheckpointOptions
from proofserve.client.judging import validator_setup
from proofserve.host import machine
from proofserve.reports import NodeError, Report, ReportedError, write_json
from proofserve.verifier import target
from proofserve.verifier.calibration_file import KernelFacts
from proofserve.verifier.chat.conversation import Conversation, ReceiptClient, requests
from proofserve.verifier.chat.verification import ChatChecker, calibration_lines
from proofserve.verifier.claims import kernel_facts
from proofserve.verifier.noise import VERIFICATIONS, checked

app = typer.Typer(help="Find the parameters that suit a model.", no_args_is_help=True)
command(app, "noise")(noise)

# Of ``chat``: chats with each server, and tokens of each answer.
CHATS, TOKENS = 130, 128

FORWARD_BATCH = 96
# Also a multiple of a node's default of 32 nonces per forward.
BATCH_SIZE = 96
# Seven whole batches for each of three keys: no forward has padding nonces.
NONCES = 2016
# Tokens. A few are enough, because a distance is as random as after many.
SEQ_LEN = 8


class CalibrateChatOptions(CheckpointOptions):
    model: ModelArgument
    out: Path
    """Write the figures, as `verify-chat` reads them."""
    url: tuple[str, ...] = ()
    """A server with receipts that you trust; repeat it for several kinds."""
    chats: int = Field(CHATS, ge=8)
    """Chats with each server."""
    tokens: int = Field(TOKENS, ge=16)
    """Tokens of each answer."""
    concurrency: int = Field(16, ge=1)
    """Chats at a time."""
    seed: int = Field(0, ge=0)
    """Chooses the prompts."""
    kv_cache: str = "auto"
    """What servers may keep keys and values in: auto, or also fp8."""
    verifications: int = Field(VERIFICATIONS, ge=1)
    """Simulated of each kernel that is left out."""
    api_key: ApiKey = None
    size: Size = "tiny"


@command(app, "chat")
def chat(given: CalibrateChatOptions, session: CommandSession) -> None:
    """Chat with honest servers, and measure the errors of their receipts.

    A server is honest if it is like one of the kernels measured here. Kernels
    of other machines are emulated: they read the same answers. Without
    --url this also starts a vLLM server of MODEL with receipts. Give one server
    for each kind that honest operators run: eager and compiled, other cards.
    All have to serve the published weights.

    Half of the answers are greedy: they tell how far rounding moves a choice.
    The errors of one answer's tokens are alike; the figures allow for it.

    At the end each kernel is left out in turn: the others must not convict it.
    If they would, verdicts get wider margins, and the output says so.

    A calibration of chat cannot be merged with another one: servers chat about
    other tokens each. Name all servers in one call.

    \b
    proofserve calibrate chat ./model --out chat.json
    proofserve calibrate chat ./model --url http://eager:8000 --url http://compiled:8000
        --out chat.json
    """
    deployed = checkpoint_named(given.model, given.size, session.line.step)
    how = given.device, given.suspect, None, given.kv_cache
    setup = validator_setup(deployed.folder, *how)
    found: list[Conversation] = []
    by_key: dict[str, KernelFacts] = {}
    for number, url in enumerate(given.url or [None]):
        said, answered = _answers(given, deployed, url, number, session)
        facts = KernelFacts.model_validate(kernel_facts(url or "vllm", said))
        # Keys of a server's starts, or of the nodes behind a gateway.
        keys = {each.receipt.sketch_key for chat in answered for each in chat.receipts}
        by_key |= dict.fromkeys(keys, facts)
        found += answered
    session.line.step(f"loading {deployed.folder}")
    checker = ChatChecker(setup, None, str(given.seed))
    made = checker.calibration(deployed.name, by_key, found, session.line)
    made = checked(made, session.line, given.verifications)
    made.write(given.out)
    for line in calibration_lines(made, len(found)):
        session.tell(line)
    session.console.print(f"calibration of {deployed.name} written to {given.out}", soft_wrap=True)


def _answers(
    given: CalibrateChatOptions,
    deployed: Checkpoint,
    url: str | None,
    number: int,
    session: CommandSession,
) -> tuple[Mapping[str, str], Sequence[Conversation]]:
    """What the server at ``url``, or one that is started, says of its kernels, and chats with it.

    Raises ReportedError for an answer without a receipt.
    """
    if url is None:
        # No proof runs beside the chats.
        ours = servers.ServerOptions(deployed.folder, deployed.name, 8, receipts=True)
        running, key = servers.serving(ours, session), None
    else:
        running, key = servers.existing_server(url, given.api_key, session), given.api_key
    with running as node, ReceiptClient(node.url, key) as client:
        asked = requests(client.model(), given.seed + number, given.chats, given.tokens)
        answered = client.chats(asked, given.concurrency, session.line)
        try:
            said = node.kernels()
        except NodeError:
            # A gateway does not say what runs behind it.
            said = {}
    for chat in answered:
        if len(chat.receipts) < len(chat.choices):
            raise ReportedError(f"{chat.name} has no receipt; start the server with --receipts")
    return said, answered


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
    names = chosen_models(ctx, models, url, ["qwen", "llama"])
    ours = [SmallModel(name, size) for name in names]
    sample = target.Sample(nonces, blocks, keys, seq_len, BATCH_SIZE)
    with open_session() as session:
        # Too few nonces are refused before anything is computed.
        target.interval_ranks(sample.total, rate)
        if url:
            measured = [servers.running_model(url, api_key, model, session)]
        else:
            # All checkpoints first: an unknown model is refused before a measurement.
            named = [(checkpoint(small), small.name) for small in ours]
            measured = [
                servers.own_model(servers.ServerOptions(*each, FORWARD_BATCH), session)
                for each in named
            ]
        radii: dict[str, dict[str, target.TargetRadius]] = {}
        reports: dict[str, dict[str, Report]] = {}
        for each in measured:
            radii[each.name], reports[each.name] = _measure(each, sample, rate, session)
        passed = all(report.passed for found in reports.values() for report in found.values())
        if json is not None:
            figures = {
                model: {method: report.json() for method, report in found.items()}
                for model, found in reports.items()
            }
            write_json(json, {"passed": passed, "models": figures})
            session.console.print(f"figures written to {json}")
        if png is not None:
            target.write_histograms(radii, png)
            session.console.print(f"histograms drawn to {png}")
    if not passed:
        raise typer.Exit(EXIT_FAILED)


def _measure(
    model: servers.ServedModel, sample: target.Sample, rate: float, session: CommandSession
) -> tuple[dict[str, target.TargetRadius], dict[str, Report]]:
    """The radius of each method, and its figures."""
    radii, reports = {}, {}
    with model.start() as node:
        where = {**machine(), **node.versions()}
        for method in target.METHODS:
            began = time.monotonic()
            distances = target.collect(node, model.name, method, sample, session.line)
            seconds = time.monotonic() - began
            radii[method] = found = target.calibrate(distances, rate)
            reports[method] = target.report_of(
                found, model.name, method, sample, seconds=seconds, where=where
            )
    for report in reports.values():
        session.console.print(report.table())
    session.console.print(target.rates_table(radii))
    return radii, reports
