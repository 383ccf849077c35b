"""Nodes over the fake engine, for tests and benchmarks of fleets.

``python -m benchmarks.fleet.fake_member COUNT CALL_S`` serves several. It writes their URLs to
``urls.json`` in its working folder once they all answer.
"""

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from measuring.files import write_whole
from proofserve.api.routes import router
from proofserve.settings.node import NodeSettings
from proofserve.wiring.launch import free_port
from proofserve.wiring.node import running_node
from support.fake_engine import TOY_ENGINE_INFO, FakeEngine

URLS = "urls.json"


@cache
def _application() -> FastAPI:
    """For any member: making an application takes a tenth of a second."""
    app = FastAPI()
    app.include_router(router(lambda request: request.scope["node"]))
    return app


class QuietServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Serving:
    """An application on a port that stays the same when it is served again."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.dates = True
        """Whether answers have a Date header of the server."""
        self._server: QuietServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, app: Any) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        config = uvicorn.Config(
            app,
            log_config=None,
            lifespan="off",
            ws="none",
            date_header=self.dates,
            # A bound method would be taken for an older interface.
            interface="asgi3",
        )
        self._server = QuietServer(config)
        self._task = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Close every connection at once."""
        if self._server is None or self._task is None:
            return
        server, task, self._server = self._server, self._task, None
        server.should_exit = server.force_exit = True
        _cut(server)
        await task
        # One that came while the server ended would else be answered for ever.
        _cut(server)
        left = list(server.server_state.tasks)
        for request in left:
            request.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _cut(server: QuietServer) -> None:
    for connection in list(server.server_state.connections):
        connection.transport.abort()


class FakeMember:
    """A node over the fake engine; ``start`` after ``kill`` is a restart with the same outbox."""

    def __init__(self, folder: Path, name: str, **settings: Any) -> None:
        self.name = name
        self.engine = FakeEngine(TOY_ENGINE_INFO)
        self.engine.latency_s = 0.01
        self.serving = Serving()
        self.url = self.serving.url
        self._values: dict[str, Any] = {
            "enabled": True,
            "outbox": folder / f"{name}.sqlite",
            "callback_interval_sec": 0.1,
            "shutdown_flush_sec": 0.0,
            **settings,
        }
        self._running = AsyncExitStack()
        self.before: Callable[[Any], Any] | None = None
        """Wraps the application, to make it misbehave."""

    async def start(self, **changes: Any) -> None:
        self._values |= changes
        settings = NodeSettings(**self._values)
        self.node = await self._running.enter_async_context(running_node(self.engine, settings))
        await self.serving.start(self._app if self.before is None else self.before(self._app))

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _application()({**scope, "node": self.node}, receive, send)

    async def kill(self) -> None:
        """End it in the middle of its round, which stays open in the outbox."""
        await self.serving.stop()
        await self._running.aclose()

    def empty_outbox(self) -> None:
        outbox = Path(self._values["outbox"])
        for file in outbox.parent.glob(f"{outbox.name}*"):
            file.unlink()

    def proved(self) -> list[int]:
        return [nonce for call in self.engine.calls for nonce in call]


async def serve(folder: Path, count: int, call_s: float) -> None:
    """Serve ``count`` members for ever; a call of an engine takes ``call_s`` seconds."""
    async with AsyncExitStack() as stack:
        urls = []
        for number in range(count):
            member = await started(folder, f"m{number}", call_s)
            stack.push_async_callback(member.kill)
            urls.append(member.url)
        write_whole(folder / URLS, json.dumps(urls))
        await asyncio.Event().wait()


async def started(folder: Path, name: str, call_s: float) -> FakeMember:
    """A member with the times of a node, not those of tests."""
    while True:
        member = FakeMember(folder, name, callback_interval_sec=5.0, callback_max_retries=0)
        member.engine.latency_s = call_s
        try:
            await member.start()
        except OSError:
            # Another process has taken its port meanwhile.
            await member.kill()
        else:
            return member


def main(
    count: Annotated[int, typer.Argument(help="members of this process")],
    call_s: Annotated[float, typer.Argument(help="seconds of an engine's call")],
) -> None:
    """Serve members over the fake engine until killed."""
    asyncio.run(serve(Path.cwd(), count, call_s))


if __name__ == "__main__":
    typer.run(main)
