"""``proofserve bench``: the speed of proofs, receipts and verdicts, and their cost for chat."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from proofserve.cli.command import ApiKey, Device, ForwardBatch, Json, Name, SeqLen, Size, Url
from proofserve.cli.model import ARCHS, ModelArgument, SmallModel, checkpoint, checkpoint_named
from proofserve.cli.servers import ServedModel, ServerOptions, own_model, running_model
from proofserve.cli.session import EXIT_FAILED, CommandSession, open_session
from proofserve.client.judging import proof_validator, validator_setup
from proofserve.host import machine
from proofserve.protocol import SEQ_LEN
from proofserve.protocol.nonces import fresh_seed
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve.reports import Figure, Progress, Report, ReportedError
from proofserve.verifier.calibration_file import CalibrationFile, calibrated_order, checkpoint_shape
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judges import BankRun
from proofserve.verifier.judging import JudgingOptions, judged
from proofserve.verifier.orders import workload_of
from proofserve.verifier.verification import claims_of_vectors
from proofserve_lab.bench.chat import Load, bench_chat, bench_waits
from proofserve_lab.bench.generation import GenerationPlan, bench_generation
from proofserve_lab.bench.receipts import ReceiptsPlan, bench_receipts
from proofserve_lab.bench.share import MeasuredShare, measure_share, share_report
from proofserve_lab.orders import Protocol, SchemeName, work_of

app = typer.Typer(help="Measure a server that we start, or a running one.", no_args_is_help=True)

# By the model's size: nonces per call, the limit of ``time_in_forwards``, and how many windows of
# rounds of how many seconds. A window holds some 20 forwards of tiny, 5 of small.
DEFAULTS = {"tiny": (32, 0.95, 40, 2.0), "small": (8, 0.99, 24, 5.0)}
# With --share, nonces per forward: a stream waits for forwards, so they are shorter, 0.1 s.
SHARE_FORWARDS = {"tiny": 32, "small": 2}
# The least throughput with receipts over that without. The engine spends less of its time on the
# model itself when that is small.
LEAST_RATIO = {"tiny": 0.97, "small": 0.99}

Arch = Annotated[str, typer.Option(help=f"One of {', '.join(ARCHS)}.")]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Nonces per engine call; 32 on tiny, 8 on small.", min=3, max=1024),
]
ForwardSize = Annotated[
    int | None,
    typer.Option(help="Nonces per forward; else the server's choice; --share: 32, small 2.", min=1),
]


@app.command("receipts")
def receipts(
    *,
    size: Size = "tiny",
    arch: Arch = "qwen3",
    clients: Annotated[int, typer.Option(help="Chats at a time.", min=1)] = 16,
    max_tokens: Annotated[int, typer.Option(help="About so many tokens of each chat.", min=2)] = 64,
    chats: Annotated[int, typer.Option(help="Chats of a turn.", min=1)] = 64,
    pairs: Annotated[int, typer.Option(help="Pairs of turns: without, with.", min=1)] = 20,
    compared: Annotated[
        int, typer.Option(help="Greedy chats whose answers are compared.", min=1)
    ] = 50,
    json: Json = None,
) -> None:
    """Measure the cost of receipts for chat: its speed with them and without.

    It starts two servers of the same model, one with receipts, and asks them
    in turns, so that a machine whose speed drifts slows both alike. Greedy
    answers must be the same byte for byte, and each must have its receipt.

    \b
    proofserve bench receipts --json figures.json
    proofserve bench receipts --size small
    """
    small = SmallModel(arch, size)
    plan = ReceiptsPlan(
        small.name,
        LEAST_RATIO.get(size, LEAST_RATIO["tiny"]),
        clients,
        tokens=max_tokens,
        chats=chats,
        pairs=pairs,
        answers=compared,
    )
    with open_session() as session:
        plain = _small_model(small, None, session)
        kept = _small_model(small, None, session, receipts=True)
        with plain.start() as off, kept.start() as on:
            report = bench_receipts(off, on, plan, session.line)
        show(report, json, session)


@app.command("verify")
def verify(
    model: ModelArgument,
    *,
    calibration: Annotated[
        Path, typer.Option(help="Of this model: what `calibrate noise --out` wrote.")
    ],
    kernel: Annotated[
        str | None,
        typer.Option(help="The honest node: one of the kernels that are emulated; else the first."),
    ] = None,
    nonces: Annotated[int, typer.Option(help="Size of the sample.", min=2)] = 128,
    size: Annotated[str, typer.Option(help="Of a small model: tiny, small, or 0.6b.")] = "small",
    device: Device = "cpu",
    forward_batch: ForwardBatch = 8,
    json: Json = None,
) -> None:
    """Measure how long `verify` takes to clear an honest node of a model.

    The node is emulated, so no server is needed; what it claims is computed
    before the clock starts. The report shows the share of the time that goes to
    suspects, each of which is a forward by other weights.

    \b
    proofserve bench verify ./model --calibration calibration.json
    """
    # This import takes seconds, and --help must not wait for it.
    from proofserve.verifier.validator import proofs_of  # noqa: PLC0415

    with open_session() as session, session.interrupts.allowed():
        session.line.step(f"loading {model}, after writing it if it is not in the cache")
        found = checkpoint_named(model, size, session.line.step)
        measured = CalibrationFile.read(calibration)
        work = workload_of(replace(calibrated_order(measured), block_hash=fresh_seed()))
        setup = validator_setup(found.folder, device, measured=measured)
        node = proof_validator(setup, work, forward_batch)
        shape, digest = checkpoint_shape(found.folder), node.weights_digest
        measured.require(work, [found.name], shape, digest, node.is_dense)
        served = kernel or node.kernels[0]
        if served not in node.kernels:
            raise ReportedError(f"--kernel {served}: choose from {', '.join(node.kernels)}")
        session.line.step(f"computing {nonces} nonces as {served} does")
        vectors = node.vectors(BankRun(kernels=served), range(nonces))
        claims = tuple(claims_of_vectors(vectors))
        claimed = ClaimedArtifacts(work.block.hash, work.public_key, tuple(vectors), claims)
        validator = node.with_other(proofs_of(work, forward_batch))
        truth = validator.as_truth(work.scheme.width, forward_batch)
        began = time.monotonic()
        judging = JudgingOptions(threshold=measured)
        outcome = judged(claimed, truth, judging, fresh_seed(), None, session.line).outcome
        seconds = time.monotonic() - began
        if outcome.verdict is not SequentialResult.HONEST:
            raise ReportedError(
                f"the honest node ended {outcome.verdict} after {outcome.nonces_used} nonces;"
                " give more --nonces, or a calibration of more kernels"
            )
        share, title = validator.suspects_s / seconds, f"verification, {found.name}"
        plan = {"model": found.name, "kernel": served, "scheme": work.scheme.name, "sample": nonces}
        until = "from the first nonce to the verdict, model loaded"
        figures = (
            Figure("seconds_to_honest", seconds, until),
            Figure("nonces", float(outcome.nonces_used), "recomputed until then"),
            Figure("share_of_suspects", share, "of that time; 0 where lengths rule each one out"),
        )
        show(Report(title, figures, plan, {}, machine()), json, session)


@app.command("generation")
def generation(
    *,
    protocol: Protocol = "artifact",
    scheme: SchemeName = None,
    size: Size = "tiny",
    arch: Arch = "qwen3",
    seq_len: SeqLen = SEQ_LEN,
    batch_size: BatchSize = None,
    forward_batch: ForwardSize = None,
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
    slow: Annotated[
        bool, typer.Option("--slow", help="Chat's waits alone, on 0.6b: forwards take seconds.")
    ] = False,
    size: Size = "tiny",
    arch: Arch = "qwen3",
    seq_len: SeqLen = SEQ_LEN,
    batch_size: BatchSize = None,
    forward_batch: ForwardSize = None,
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
    proofserve bench chat-priority --slow
    """
    small = SmallModel(arch, "0.6b" if slow else size)
    if share:
        if url is not None:
            raise typer.BadParameter(
                "--share needs a server with that share, and the one at --url has the share that it"
                " was started with. Leave out --url, and servers are started here, one for each"
                " share."
            )
        if model is not None:
            raise typer.BadParameter("--model needs --url; with --share give --size and --arch")
        if chats is not None:
            raise typer.BadParameter("--chats has no meaning with --share: its chats never end")
        work = Work(small.name, seq_len=seq_len, batch_size=batch_size or _defaults(size, None)[0])
        # A window holds some five forwards of each model at a share of 0.1, or more.
        window_s = seconds or (10.0 if size == "small" else 5.0)
        endless = Load(clients, tokens=max_tokens, window_s=window_s, pairs=pairs or 20)
        _bench_shares(share, small, work, endless, forward_batch, json)
        return

    def measure(node: NodeClient, name: str, progress: Progress) -> Report:
        # A round stores whole batches, and a nonce of a slow model takes seconds: the fewest that
        # a node accepts.
        batch = batch_size or (3 if slow else _defaults(size, url)[0])
        work = Work(name, seq_len=seq_len, batch_size=batch)
        if slow:
            return bench_waits(node, work, chats or 100, progress)
        load = Load(clients, window_s=seconds or 3.0, pairs=pairs or 40)
        return bench_chat(node, work, chats or 200, max_tokens, load, progress)

    _run(measure, url, api_key, model, small, forward_batch, json)


@app.command("reference")
def reference(
    model: ModelArgument,
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
    device: Device = "cpu",
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
    from proofserve_lab.bench.reference import bench_reference  # noqa: PLC0415

    with open_session() as session:
        session.line.step(f"loading {model}, after writing it if it is not in the cache")
        found = checkpoint_named(model, size, session.line.step)
        network = load(found.folder, dtype, device)
        lengths, batches = seq_len or [64, 256], batch or [8, 32, 128]
        with session.interrupts.allowed():
            report = bench_reference(found.name, network, lengths, batches, seconds, session.line)
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
    """Measure the model ``name`` at ``url``, or start a server with the ``small`` model."""
    if name and not url:
        raise typer.BadParameter("--model needs --url; without a URL give --size and --arch")
    with open_session() as session:
        if url is not None:
            served = running_model(url, api_key, name, session)
        else:
            served = _small_model(small, forward_batch, session)
        with served.start() as node:
            report = measure(node, served.name, session.line)
        show(report, file, session)


def _bench_shares(
    shares: list[float],
    small: SmallModel,
    work: Work,
    load: Load,
    forward_batch: int | None,
    file: Path | None,
) -> None:
    """Measure each share on a server of its own."""
    measured = list[MeasuredShare]()
    where: dict[str, str | int] = {}
    batch = forward_batch or SHARE_FORWARDS.get(small.size, SHARE_FORWARDS["tiny"])
    with open_session() as session:
        for share in dict.fromkeys(shares):
            with _small_model(small, batch, session, share=share).start() as node:
                measured.append(measure_share(node, share, work, load, session.line))
                where = {**machine(), **node.versions()}
        show(share_report(work, load, measured, where), file, session)


def _small_model(
    small: SmallModel,
    forward_batch: int | None,
    session: CommandSession,
    *,
    share: float = 0.0,
    receipts: bool = False,
) -> ServedModel:
    """A server of our own with the model ``small``, not started yet."""
    ours = ServerOptions(
        checkpoint(small), small.name, forward_batch, measure=True, share=share, receipts=receipts
    )
    return own_model(ours, session)


def show(report: Report, file: Path | None, session: CommandSession) -> None:
    """Print and write ``report``; ends with exit code 1 if a figure breaks its limit."""
    session.console.print(report.table())
    if file is not None:
        report.write(file)
        session.console.print(f"figures written to {file}")
    if not report.passed:
        raise typer.Exit(EXIT_FAILED)


def _defaults(size: str, url: str | None) -> tuple[int, float, int, float]:
    # The model at --url may have any size, and ``checkpoint`` refuses an unknown size later.
    return DEFAULTS["small" if size == "small" and url is None else "tiny"]
