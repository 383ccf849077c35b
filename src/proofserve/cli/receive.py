"""``proofserve receive``: a server that stores callbacks."""

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

import typer
import uvicorn
from rich.live import Live

from proofserve.receiver.app import MAX_BODY_BYTES, create_app
from proofserve.receiver.callbacks import SignatureCheck
from proofserve.receiver.reader import ReceiverFileError
from proofserve.receiver.store import ReceiverStore, render

app = typer.Typer()


@app.command()
def receive(
    port: Annotated[int, typer.Option(help="TCP port to listen on.", min=0, max=65535)] = 9000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    database: Annotated[Path, typer.Option(help="SQLite file of the callbacks.")] = Path(
        "proofserve-received.sqlite"
    ),
    max_body_bytes: Annotated[
        int, typer.Option(help="Largest body, bytes; a larger one gets 413.", min=1)
    ] = MAX_BODY_BYTES,
    secret: Annotated[
        str | None,
        typer.Option(
            envvar="POC_CALLBACK_SECRET",
            help="Accept only callbacks signed with this secret in the last five minutes.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option(help="Show no live summary.")] = False,
) -> None:
    """Receive callbacks (/generated, /validated, /logged), store them, and show a live summary.

    \b
    proofserve receive --port 9000
    and in a round: "url": "http://127.0.0.1:9000"

    For nodes on other machines: give --host, set POC_CALLBACK_SECRET to one value
    on node and receiver, and start the node with
    --poc-callback-allow http://RECEIVER:9000.

    With POC_RECEIPTS_CALLBACK=http://RECEIVER:9000 a node also posts the public log of
    its receipts. `verify-chat --log FILE` reads it.
    """
    check = SignatureCheck(secret.encode()) if secret else None
    try:
        store = ReceiverStore.open(database)
    except ReceiverFileError as error:
        text = f"{error}; give another file"
        raise typer.BadParameter(text, param_hint="--database") from error
    served = create_app(store, check, max_body_bytes)
    config = uvicorn.Config(served, host=host, port=port, log_level="warning")
    server = uvicorn.Server(config)

    async def serve() -> None:
        if quiet:
            await server.serve()
            return
        with Live(render(store.summary()), refresh_per_second=2) as live:
            serving = asyncio.create_task(server.serve())
            while not serving.done():
                live.update(render(store.summary()))
                await asyncio.wait({serving}, timeout=0.5)
            await serving

    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(store):
        asyncio.run(serve())
