"""``proofserve bench``: its group of commands; ``generation``, ``chat-priority``, ``reference``."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from proofserve.cli.bench.receipts import receipts
from proofserve.cli.bench.running import Arch, exit_if_failed, show, small_model
from proofserve.cli.bench.shares import bench_shares, refuse_other_options
from proofserve.cli.bench.verifying import bench_verify
from proofserve.cli.model import NAMES, SmallModel, checkpoint_named
from proofserve.cli.options import (
    ApiKey,
    Json,
    Name,
    Protocol,
    SchemeName,
    SeqLen,
    Size,
    Url,
    work_of,
)
from proofserve.cli.servers import running_model
from proofserve.cli.session import open_session
from proofserve.lab.bench.chat import ChatPlan, bench_chat
from proofserve.lab.bench.generation import GenerationPlan, bench_generation
from proofserve.lab.bench.reference import Forward, ReferencePlan, ReferenceSubject, bench_reference
from proofserve.lab.bench.saturation import Load
from proofserve.lab.bench.share import ShareLoad
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.progress import Progress
from proofserve.lab.client.records import Work
from proofserve.lab.report.machine import machine
from proofserve.lab.report.report import Report
from proofserve.protocol import SEQ_LEN
from proofserve.protocol.artifact import ArtifactScheme
from proofserve.protocol.identity import Block
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import Workload

if TYPE_CHECKING:
    from proofserve.engines.reference.network import Network

app = typer.Typer(help="Measure a server that we start, or a running one.", no_args_is_help=True)
app.command("receipts")(receipts)
app.command("verify")(bench_verify)


# By the model's size: nonces per call and per forward, the limit of ``time_in_forwards``, and how
# many windows of rounds of how many seconds. A forward must be short enough for chat, and long
# enough to make the work around it negligible. A window holds some 20 forwards of tiny, 5 of small.
DEFAULTS = {"tiny": (32, 0.95, 40, 2.0), "small": (8, 0.99, 24, 5.0)}
BLOCK = Block("block", 1)
SEQ_LENS, BATCHES = [64, 256], [8, 32, 128]

BatchSize = Annotated[
    int | None,
    typer.Option(help="Nonces per engine call; 32 on tiny, 8 on small.", min=3, max=1024),
]
ForwardBatch = Annotated[
    int | None,
    typer.Option(help="Nonces per forward at most; tiny 32; small 8, with --share 2.", min=1),
]


@app.command("generation")
def generation(
    *,
    protocol: Protocol = "artifact",
    scheme: SchemeName = None,
    size: Size = "tiny",
    arch: Arch = "qwen3",
    seq_len: SeqLen = SEQ_LEN,
    batch_size: BatchSize = None,
    forward_batch: ForwardBatch = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Total time of rounds: 80 in 40 windows; small: 120 in 24.", min=1.0),
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    model: Name = None,
    json: Json = None,
) -> None:
    """Measure the speed of a round beside bare forwards and vLLM's prefill.

    \b
    proofserve bench generation --size small --json figures.json
    proofserve bench generation --protocol distance   (every nonce wins)
    proofserve bench generation --scheme sketch-v2
    proofserve bench generation --url http://127.0.0.1:8000   (needs serve --poc-measure)
    """

    def measure(node: NodeClient, name: str, progress: Progress) -> Report:
        batch, busy, windows, window_s = _defaults(size, url)
        work = work_of(protocol, name, seq_len, batch_size or batch, scheme)
        plan = GenerationPlan(work, seconds or window_s * windows, windows, busy)
        return bench_generation(node, plan, progress)

    _run(measure, url, api_key, model, SmallModel(arch, size), forward_batch, json)


@app.command("chat-priority")
def chat_priority(
    *,
    share: Annotated[
        list[float] | None,
        typer.Option(help="Measure a server with this --poc-share, repeatable.", min=0.01, max=0.9),
    ] = None,
    chats: Annotated[
        int | None, typer.Option(help="Chats in each of seven runs; 200.", min=1)
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens of each chat; with --share about so many.", min=1)
    ] = 16,
    clients: Annotated[int, typer.Option(help="Chats at a time in a window.", min=1)] = 64,
    seconds: Annotated[
        float | None, typer.Option(help="Length of a window; 3, with --share 5; small 10.", min=1.0)
    ] = None,
    pairs: Annotated[
        int | None, typer.Option(help="Pairs of windows: bare, round; 40, with --share 20.", min=1)
    ] = None,
    size: Size = "tiny",
    arch: Arch = "qwen3",
    seq_len: SeqLen = SEQ_LEN,
    batch_size: BatchSize = None,
    forward_batch: ForwardBatch = None,
    url: Url = None,
    api_key: ApiKey = None,
    model: Name = None,
    json: Json = None,
) -> None:
    """Measure the cost of a round for chat: answers, waiting time, throughput.

    With --share it starts a server for each share and keeps it under endless
    streamed chat. It reports the share of engine time that proofs had, what
    chat lost in tokens a second, and the time between two tokens of a chat
    with and without a round. Limits: the share is kept within 0.02, and chat
    loses at most the share and 0.02.

    \b
    proofserve bench chat-priority --json figures.json
    proofserve bench chat-priority --url http://127.0.0.1:8000 --chats 50
    proofserve bench chat-priority --share 0.1 --share 0.2
    """
    small = SmallModel(arch, size)
    if share:
        refuse_other_options(url, model, chats)
        work = Work(small.name, seq_len=seq_len, batch_size=batch_size or _defaults(size, None)[0])
        # A window holds some five forwards of each model at a share of 0.1, or more.
        window_s = seconds or (10.0 if size == "small" else 5.0)
        endless = ShareLoad(clients, tokens=max_tokens, window_s=window_s, pairs=pairs or 20)
        bench_shares(share, small, work, endless, forward_batch, json)
        return

    def measure(node: NodeClient, name: str, progress: Progress) -> Report:
        batch = batch_size or _defaults(size, url)[0]
        work = Work(name, seq_len=seq_len, batch_size=batch)
        load = Load(clients, window_s=seconds or 3.0, pairs=pairs or 40)
        return bench_chat(node, ChatPlan(work, chats or 200, max_tokens, load), progress)

    _run(measure, url, api_key, model, small, forward_batch, json)


@app.command("reference")
def reference(
    model: Annotated[str, typer.Argument(help=f"{', '.join(NAMES)}, or a folder.")],
    *,
    size: Annotated[
        str, typer.Option(help="Of a small model: tiny, small, or 0.6b (shaped like Qwen3-0.6B).")
    ] = "small",
    seq_len: Annotated[
        list[int] | None, typer.Option(help="Tokens per nonce, repeatable; 64 and 256.", min=1)
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Nonces per forward, repeatable; 8, 32, 128.", min=1)
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="Time for each combination.", min=0.1)] = 2.0,
    json: Json = None,
) -> None:
    """Measure how many nonces a second the reference engine recomputes.

    The report also compares this with the speed of bare matrix
    multiplications on the device, measured in the same run. It leaves out
    batches that do not fit into the device's memory.

    \b
    proofserve bench reference qwen --size small
    proofserve bench reference qwen --size 0.6b --device cuda --batch 32 --batch 512
    """
    # These imports take two seconds, and the other commands of the group do not need them.
    from proofserve.engines.reference.network import load  # noqa: PLC0415

    with open_session() as session:
        session.line.step(f"loading {model}, after writing it if it is not in the cache")
        found = checkpoint_named(model, size)
        network = load(found.folder, dtype, device)
        subject = ReferenceSubject(
            found.name, network.weights, network.device, network.dtype, _forward(network)
        )
        plan = ReferencePlan(seq_len or SEQ_LENS, batch or BATCHES, seconds)
        with session.interrupts.allowed():
            report = bench_reference(subject, plan, machine(), session.line)
        show(report, json, session)


def _run(
    measure: Callable[[NodeClient, str, Progress], Report],
    url: str | None,
    api_key: str | None,
    name: str | None,
    small: SmallModel,
    forward_batch: int | None,
    file: Path | None,
) -> None:
    """Measure the model ``name`` at ``url``, or start a server with the ``small`` model.

    Ends with exit code 1 if a figure breaks its limit.
    """
    if name and not url:
        raise typer.BadParameter("--model needs --url; without a URL give --size and --arch")
    with open_session() as session:
        if url is not None:
            served = running_model(url, api_key, name, session)
        else:
            batch = forward_batch or _defaults(small.size, None)[0]
            served = small_model(small, batch, session)
        with served.start() as node:
            report = measure(node, served.name, session.line)
        show(report, file, session)
    exit_if_failed(report)


def _defaults(size: str, url: str | None) -> tuple[int, float, int, float]:
    # The model at --url may have any size, and ``checkpoint`` refuses an unknown size later.
    return DEFAULTS["small" if size == "small" and url is None else "tiny"]


def _forward(network: "Network") -> Forward:
    from proofserve.engines.reference.engine import ReferenceEngine  # noqa: PLC0415 - as above

    def forward(seq_len: int, batch: int) -> bool:
        engine = ReferenceEngine(network, batch)
        try:
            engine.compute(Workload(ArtifactScheme(), BLOCK, "key", seq_len), range(batch))
        except EngineFault as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                return False
            raise
        return True

    return forward
