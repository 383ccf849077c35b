"""Serves an application on a private unix socket in a process that already has a server."""

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from proofserve.wiring.listen import folder_for_sockets

SOCKET = "http.sock"
# The gateway is the only client and closes idle connections itself. A server that closes first
# would race with the client's next request. Seconds.
KEEP_ALIVE_S = 3600
# How long cancelled requests may take to end, seconds.
CUT_OFF_S = 1.0


class _ServerWithoutSignals(uvicorn.Server):
    """A server that leaves the signals to its process."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def on_unix_socket(app: ASGIApp, grace_s: int = 5) -> AsyncIterator[Path]:
    """Serve ``app`` over HTTP/1.1 in the running loop; yields the socket's path once it accepts.

    When the context ends, the server accepts no more connections, gives requests ``grace_s``
    seconds to finish, and cancels the others. It does not run the lifespan of ``app``, and does
    not touch the logging and signals of the process. Raises OSError if it cannot bind the socket.
    """
    with folder_for_sockets(SOCKET) as folder:
        path = folder / SOCKET
        config = uvicorn.Config(
            app,
            uds=str(path),
            ws="none",
            lifespan="off",
            log_config=None,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
        )
        server = _ServerWithoutSignals(config)
        serving = asyncio.create_task(server.serve(), name="proofserve-unix-socket")
        try:
            await _accepting(server, serving)
            yield path
        finally:
            server.should_exit = True
            await serving
            if cut_off := set(server.server_state.tasks):
                await asyncio.wait(cut_off, timeout=CUT_OFF_S)


async def _accepting(server: uvicorn.Server, serving: "asyncio.Task[None]") -> None:
    while not server.started:
        if serving.done():
            serving.result()
        await asyncio.sleep(0.01)
