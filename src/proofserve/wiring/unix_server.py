"""Serves an application on a private unix socket, inside a process that has a server already."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

# What the system allows the path of a socket, bytes.
SOCKET_PATH = 107
PREFIX = "proofserve-"
SOCKET = "http.sock"
# The only client is ours and knows best when a connection has been idle for too long; a server
# that closes first would race with its next request. Seconds.
KEEP_ALIVE_S = 3600
# How long requests that were cut off may take to notice, seconds.
CUT_OFF_S = 1.0


class _GuestServer(uvicorn.Server):
    """A server that leaves signals to the process it is a guest of."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def on_unix_socket(app: ASGIApp, grace_s: int = 5) -> AsyncIterator[Path]:
    """Serve ``app`` over HTTP/1.1 in the running loop; yields the socket's path once it accepts.

    At the context's end no connection is accepted any more, requests have ``grace_s`` seconds to
    finish, and what is left is cancelled. The lifespan of ``app`` and the process's logging and
    signals are left alone. Raises OSError if the socket cannot be bound.
    """
    with _private_folder() as folder:
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
        server = _GuestServer(config)
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


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A fresh folder that only this user may enter, short enough to hold a socket."""
    base = tempfile.gettempdir()
    short = len(os.fsencode(base)) <= SOCKET_PATH - len(f"/{PREFIX}12345678/{SOCKET}")
    place = base if short else "/tmp"  # noqa: S108 - the folder in it is nobody else's
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=place) as folder:
        yield Path(folder)
