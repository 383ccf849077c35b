"""``proofserve calibrate chat``: what honest chat answers look like."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proofserve.cli.model import Checkpoint, checkpoint_named
from proofserve.cli.options import ApiKey, Device, Size, Suspects
from proofserve.cli.servers import ServerOptions, serving
from proofserve.cli.session import CommandSession, open_session
from proofserve.lab.calibrate.calibration_file import CalibrationFile, checkpoint_shape
from proofserve.lab.chat.calibration import Calibrated, calibration_lines
from proofserve.lab.chat.collecting import ReceiptClient
from proofserve.lab.chat.conversation import Conversation
from proofserve.lab.chat.prompts import requests
from proofserve.lab.client.errors import LabError

if TYPE_CHECKING:
    from proofserve.wiring.chat.checker import ChatChecker

CHATS, TOKENS = 130, 128
FORWARD_BATCH = 8


def chat(
    model: Annotated[str, typer.Argument(help="trained, qwen, llama, gemma, or a folder.")],
    *,
    out: Annotated[Path, typer.Option(help="Write the figures, as `verify-chat` reads them.")],
    url: Annotated[
        list[str] | None,
        typer.Option(help="A server with receipts that you trust; repeat it for several kinds."),
    ] = None,
    chats: Annotated[int, typer.Option(help="Chats with each server.", min=8)] = CHATS,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=16)] = TOKENS,
    concurrency: Annotated[int, typer.Option(help="Chats at a time.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Chooses the prompts.", min=0)] = 0,
    suspect: Suspects = None,
    api_key: ApiKey = None,
    device: Device = "cpu",
    size: Size = "tiny",
) -> None:
    """Chat with honest servers, and measure the errors of their receipts.

    Without --url this starts a vLLM server of MODEL with receipts. Give one
    server for each kind that honest operators run: eager and compiled, other
    cards, every dtype of the KV cache that you allow. All have to serve the
    published weights.

    Half of the answers are greedy: they tell how far rounding moves a choice.
    The errors of one answer's tokens are alike; the figures allow for it.

    \b
    proofserve calibrate chat ./model --out chat.json
    proofserve calibrate chat ./model --url http://eager:8000 --url http://compiled:8000
        --out chat.json
    """
    # Loading torch takes seconds, and --help must not wait for it.
    from proofserve.wiring.chat.checker import ChatChecker, CheckerSetup  # noqa: PLC0415

    with open_session() as session:
        deployed = checkpoint_named(model, size)
        found: list[Conversation] = []
        for number, server in enumerate(url or [None]):
            asked = partial(requests, seed=seed + number, count=chats, max_tokens=tokens)
            with _server(server, deployed, api_key, session) as client:
                found += client.chats(asked(client.model()), concurrency, session.line)
        with session.interrupts.allowed():
            about = Calibrated(deployed.name, checkpoint_shape(deployed.folder), _named(url))
            session.line.step(f"loading {deployed.folder}")
            others = tuple(suspect or ())
            setup = CheckerSetup(deployed.folder, None, str(seed), device, others)
            _measured(about, ChatChecker(setup), found, session).write(out)
        session.console.print(f"calibration of {deployed.name} written to {out}", soft_wrap=True)


@contextmanager
def _server(
    url: str | None, deployed: Checkpoint, api_key: str | None, session: CommandSession
) -> Iterator[ReceiptClient]:
    if url is not None:
        with ReceiptClient(url, api_key) as client, session.interrupts.allowed():
            yield client
        return
    options = ServerOptions(deployed.folder, deployed.name, FORWARD_BATCH, receipts=True)
    with serving(options, session) as node, ReceiptClient(node.url) as client:
        yield client


def _measured(
    about: Calibrated,
    checker: "ChatChecker",
    chats: Sequence[Conversation],
    session: CommandSession,
) -> CalibrationFile:
    if lacking := [chat.name for chat in chats if len(chat.receipts) < len(chat.choices)]:
        raise LabError(f"{lacking[0]} has no receipt; start the server with --receipts")
    made = checker.calibration(about, chats, session.line)
    for line in calibration_lines(made, len(chats)):
        session.console.print(line, markup=False, soft_wrap=True)
    return made


def _named(urls: Sequence[str] | None) -> str:
    return f"{len(urls)} servers" if urls else "vllm"
