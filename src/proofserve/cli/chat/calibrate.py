"""``proofserve calibrate chat``: what honest chat answers look like."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from proofserve.cli.model import NAMES, Checkpoint, checkpoint_named
from proofserve.cli.options import ApiKey, Device, Size, Suspects
from proofserve.cli.recompute import kernel_facts
from proofserve.cli.servers import ServerOptions, serving
from proofserve.cli.session import CommandSession, open_session
from proofserve.lab.calibrate.calibration_file import KernelFacts, checkpoint_shape
from proofserve.lab.calibrate.left_out import VERIFICATIONS, checked
from proofserve.lab.chat.calibration import Calibrated, calibration_lines
from proofserve.lab.chat.collecting import ReceiptClient
from proofserve.lab.chat.conversation import Conversation
from proofserve.lab.chat.prompts import requests
from proofserve.lab.client.errors import LabError, NodeError
from proofserve.lab.client.node_client import NodeClient

CHATS, TOKENS = 130, 128
FORWARD_BATCH = 8


def chat(
    model: Annotated[str, typer.Argument(help=f"{', '.join(NAMES)}, or a folder.")],
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
    kv_cache: Annotated[
        str, typer.Option(help="What servers may keep keys and values in: auto, or also fp8.")
    ] = "auto",
    suspect: Suspects = None,
    verifications: Annotated[
        int, typer.Option(help="Simulated of each kernel that is left out.", min=1)
    ] = VERIFICATIONS,
    api_key: ApiKey = None,
    device: Device = "cpu",
    size: Size = "tiny",
) -> None:
    """Chat with honest servers, and measure the errors of their receipts.

    A server is honest if it is like one of the kernels measured here. Some 25
    kernels of other machines are emulated: they read the same answers. Without
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
    # Loading torch takes seconds, and --help must not wait for it.
    from proofserve.wiring.chat.checker import ChatChecker, CheckerSetup  # noqa: PLC0415
    from proofserve.wiring.validator import KV_DTYPES  # noqa: PLC0415

    with open_session() as session:
        if kv_cache not in KV_DTYPES:
            raise LabError(f"--kv-cache {kv_cache}: choose from {', '.join(KV_DTYPES)}")
        deployed = checkpoint_named(model, size)
        found: list[Conversation] = []
        servers: dict[str, KernelFacts] = {}
        for number, server in enumerate(url or [None]):
            asked = partial(requests, seed=seed + number, count=chats, max_tokens=tokens)
            with _server(server, deployed, api_key, session) as client:
                answered = client.chats(asked(client.model()), concurrency, session.line)
                facts = _facts(client.url, server or "vllm", api_key)
            servers |= dict.fromkeys(_sketch_keys(answered), facts)
            found += answered
        with session.interrupts.allowed():
            shape = checkpoint_shape(deployed.folder)
            about = Calibrated(deployed.name, shape, kv_cache, servers)
            session.line.step(f"loading {deployed.folder}")
            setup = CheckerSetup(
                deployed.folder,
                None,
                str(seed),
                device=device,
                suspects=tuple(suspect or ()),
                kv_dtype=kv_cache,
            )
            made = ChatChecker(setup).calibration(about, found, session.line)
            made = checked(made, session.line, verifications)
            made.write(out)
        for line in calibration_lines(made, len(found)):
            session.console.print(line, markup=False, soft_wrap=True)
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


def _sketch_keys(chats: Sequence[Conversation]) -> set[str]:
    """Those of the starts of a server, or of the nodes behind a gateway."""
    if lacking := [chat.name for chat in chats if len(chat.receipts) < len(chat.choices)]:
        raise LabError(f"{lacking[0]} has no receipt; start the server with --receipts")
    return {each.receipt.sketch_key for chat in chats for each in chat.receipts}


def _facts(url: str, name: str, api_key: str | None) -> KernelFacts:
    """What a node says of its kernels; only its name if ``url`` is a gateway."""
    try:
        with NodeClient(url, api_key) as node:
            said = node.kernels()
    except NodeError:
        said = {}
    return KernelFacts.model_validate(kernel_facts(name, said))
