"""Where servers listen: ports, bound before the server starts, and private unix sockets."""

import asyncio
import errno
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

# The longest path of a socket that the system allows, bytes.
SOCKET_PATH = 107
PREFIX = "proofserve-"

HINT = (
    " Another process uses it: end that process, or choose another port with --port /"
    " VLLM_PORT (a fleet: FLEET_PORT)."
)
SOCKET = "http.sock"
# The gateway is the only client and closes idle connections itself. A server that closes first
# would race with the client's next request. Seconds.
KEEP_ALIVE_S = 3600
# How long cancelled requests may take to end, seconds.
CUT_OFF_S = 1.0


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """One for each address of ``host``, which accepts nothing yet. Raises OSError."""
    sockets: list[socket.socket] = []
    try:
        for family, kind, proto, _, address in socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            one = socket.socket(family, kind, proto)
            sockets.append(one)
            # Connections of a server that has just ended must not hold the port.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
    except OSError as error:
        for one in sockets:
            one.close()
        raise cannot_listen(host, port, error) from error
    return sockets


def cannot_listen(host: str, port: int, error: OSError) -> OSError:
    hint = HINT if error.errno == errno.EADDRINUSE else ""
    return OSError(f"cannot listen on {host}, port {port}: {error.strerror}.{hint}")


@contextmanager
def folder_for_sockets(longest: str) -> Iterator[Path]:
    """A new folder that only this user may enter, short enough for a socket named ``longest``."""
    base = tempfile.gettempdir()
    short = len(os.fsencode(base)) <= SOCKET_PATH - len(f"/{PREFIX}12345678/{longest}")
    place = base if short else "/tmp"  # noqa: S108 - only this user may enter the folder in it
    # A process that is being killed may still create a file there meanwhile.
    with tempfile.TemporaryDirectory("", PREFIX, place, ignore_cleanup_errors=True) as path:
        yield Path(path)


class OrderlyServer(uvicorn.Server):
    """A server whose process ends with exit code 0 after a signal: uvicorn would raise it again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            self._captured_signals.clear()


class _GuestServer(uvicorn.Server):
    """A server in a process that already has one: it leaves the signals to that."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def on_unix_socket(app: ASGIApp, grace_s: int = 5) -> AsyncIterator[Path]:
    """Serve ``app`` over HTTP/1.1 in the running loop; yields the socket's path once it accepts.

    At the end requests have ``grace_s`` seconds to finish, then they are cancelled. The lifespan of
    ``app``, and the logging and signals of the process, are left alone. Raises OSError.
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
        server = _GuestServer(config)
        serving = asyncio.create_task(server.serve(), name="proofserve-unix-socket")
        try:
            while not server.started:
                if serving.done():
                    serving.result()
                await asyncio.sleep(0.01)
            yield path
        finally:
            server.should_exit = True
            await serving
            if cut_off := set(server.server_state.tasks):
                await asyncio.wait(cut_off, timeout=CUT_OFF_S)
