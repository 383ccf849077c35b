"""One of several API processes owns the node; the others pass calls on to it, over a unix socket.

The lock of the outbox elects the owner (ADR 31). A file beside the outbox says which process owns
it, and where that one answers: with the proof routes alone (``private_app``). A request that is
passed on keeps its headers, and the address of its client comes in a header of ours, so that the
owner checks keys and addresses as if the client had come to it.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx
from fastapi import APIRouter, FastAPI
from starlette.datastructures import URLPath
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, NoMatchFound
from starlette.types import ASGIApp, Receive, Scope, Send

from proofserve.api.access import READING, Access, ApiError, role_for
from proofserve.api.node import Node, while_connected
from proofserve.api.requests import (
    close_if_upgraded,
    count_and_log,
    error_response,
    reason_of,
    with_whole_body,
)
from proofserve.dashboard.routes import SNAPSHOT
from proofserve.outbox.database import OutboxInUse, is_locked
from proofserve.rounds.errors import RoundsError
from proofserve.rounds.tasks import woken
from proofserve.wire import PROOFS, RECEIPTS
from proofserve.wiring.sockets import on_unix_socket

_logger = logging.getLogger(__name__)

# Seconds between two looks at the lock.
POLL_S = 0.25
# The longest wait of a starting process until one of this server owns the proofs, seconds.
START_S = 60.0
# Pause after a failed attempt to take a free outbox, seconds.
RETRY_S = 1.0

# A running node, made when this process has become the owner, and the routes that it serves to the
# other processes. The argument: whether another process of this server owned the node before, whose
# round goes on.
StartNode = Callable[[bool], AbstractAsyncContextManager[tuple[Node, list[APIRouter]]]]


def this_server() -> str:
    """The id of the process that started this one and its siblings, and its start in clock ticks.

    Ids alone repeat, in containers above all.
    """
    parent = os.getppid()
    # Field 22 of proc(5); the second one is a name in parentheses, which may hold spaces.
    fields = Path(f"/proc/{parent}/stat").read_text("utf-8").rpartition(")")[2].split()
    return f"{parent}-{fields[19]}"


def address_file(outbox: Path) -> Path:
    return outbox.with_name(f"{outbox.name}.owner")


@dataclass(eq=False, repr=False)
class Ownership:
    """Whether this process owns the node, and where the process is that does.

    ``server`` is that of ``this_server``.
    """

    _outbox: Path
    _server: str
    _start: StartNode
    node: Node | None = field(default=None, init=False)
    _ending: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _electing: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def owner(self) -> str | None:
        """The path of the unix socket of this server's owner; None while there is none.

        Its process may have been killed since it wrote that.
        """
        try:
            found = json.loads(address_file(self._outbox).read_text("utf-8"))
            return str(found["socket"]) if found["server"] == self._server else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    @property
    def is_ending(self) -> bool:
        return self._ending.is_set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Ownership"]:
        """Take part in the election until the context ends. It begins when there is an owner.

        Raises OutboxInUse if a process of another server has the lock, and whatever keeps the node
        from starting.
        """
        self._electing = asyncio.create_task(self._elect(), name="proofserve-ownership")
        try:
            deadline = time.monotonic() + START_S
            while self.node is None and self.owner is None:
                if self._electing.done():
                    self._electing.result()
                if time.monotonic() > deadline:
                    raise OutboxInUse(
                        f"another running server uses the outbox {self._outbox}: stop that server,"
                        " or give this one another file with POC_OUTBOX"
                    )
                await asyncio.sleep(POLL_S)
            self._electing.add_done_callback(_report)
            yield self
        finally:
            await self.end()

    async def end(self) -> None:
        """Own nothing from now on: end the node, so that another process may take it at once."""
        self._ending.set()
        if self._electing is not None:
            await asyncio.wait({self._electing})

    async def _elect(self) -> None:
        """Own the node whenever no other process does. Raises what its first start raises."""
        was_owned = False
        while not self._ending.is_set():
            try:
                await self._own(was_owned)
            except OutboxInUse:
                if not was_owned:
                    _logger.info("another API process owns the proofs: calls are passed on to it")
                was_owned = True
                while not self._ending.is_set() and is_locked(self._outbox):
                    await woken(self._ending, POLL_S)
            except RoundsError as error:
                if not was_owned:
                    raise
                _logger.warning("this process cannot own the proofs, again in a second: %s", error)
                await woken(self._ending, RETRY_S)

    async def _own(self, was_owned: bool) -> None:
        async with (
            self._start(was_owned) as (node, routers),
            on_unix_socket(private_app(routers)) as socket,
        ):
            self._publish({"server": self._server, "process": os.getpid(), "socket": str(socket)})
            self.node = node
            _logger.info("this API process (%d) owns the proofs", os.getpid())
            try:
                await self._ending.wait()
            finally:
                # New calls wait for the next owner: here they would see a round that stops.
                self.node = None
                with suppress(OSError):
                    address_file(self._outbox).unlink(missing_ok=True)
            # Before the socket ends: calls that wait for jobs end with the jobs.
            await node.manager.aclose()

    def _publish(self, address: dict[str, str | int]) -> None:
        """Write the file in one step: another process reads the old address or the new one."""
        path = address_file(self._outbox)
        written = path.with_name(f"{path.name}.{os.getpid()}")
        written.write_text(json.dumps(address), "utf-8")
        os.replace(written, path)  # noqa: PTH105 - the same as Path.replace, which hides that it is atomic


def _report(electing: "asyncio.Task[None]") -> None:
    if not electing.cancelled() and (error := electing.exception()) is not None:
        text = "this API process can own no proofs any more; restart the server"
        _logger.critical(text, exc_info=error)


# -- forwarding ------------------------------------------------------------------------------------

# The addresses of the client and of the server that it asked, or null, in JSON. The process that
# passes a request on removes the client's own header.
CLIENT = b"x-proofserve-client"
# Each process answers this one itself.
LIVE = f"{PROOFS}/health/live"
# How long a call waits for the next owner, and the pause between two looks, seconds.
NEXT_OWNER_S = 30.0
LOOK_S = 0.1
# When a client may ask again after a call that had no owner, seconds.
_OWNER_AGAIN_S = 1.0
# Of one connection only (RFC 9110, 7.6.1).
_HOP_BY_HOP = frozenset(
    name.encode()
    for name in ("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
)
# This process writes its own.
_OWN_HEADERS = _HOP_BY_HOP | {b"date", b"server"}


@dataclass(eq=False, repr=False)
class ForwardingRoute(BaseRoute):
    """All proof routes, in a process that does not own the node; there it comes before them.

    ``access`` refuses a call without a valid key before its body is read; the owner checks it too.
    """

    _ownership: Callable[[], Ownership | None]
    _access: Access
    _max_body_bytes: int
    path: ClassVar = f"{PROOFS}/{{rest:path}}"

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        ownership = self._ownership()
        if scope["type"] != "http" or ownership is None or ownership.node is not None:
            return Match.NONE, {}
        path = _path(scope)
        ours = path.startswith((f"{PROOFS}/", f"{RECEIPTS}/")) and path != LIVE
        # Not the page's stream: an answer is read to its end. The page then asks for snapshots.
        ours = ours or path == SNAPSHOT
        return (Match.FULL if ours else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except ApiError as error:
            response = error_response(error)
            count_and_log(None, request, response, reason_of(error))
        close_if_upgraded(request, response)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        ownership = self._ownership()
        if ownership is None:
            raise ApiError("not_enabled", "PoC not enabled")
        body = b""
        if request.method not in READING:
            self._access.admit(request, role_for({request.method}, _path(request.scope)))
            read = await with_whole_body(request, self._max_body_bytes)
            body = await read.body()
        return await while_connected(request, _ask_owner(ownership, request, body))

    def url_path_for(self, name: str, /, **path_params: Any) -> URLPath:
        """Always raises NoMatchFound: the route has no name."""
        raise NoMatchFound(name, path_params)


def _path(scope: Scope) -> str:
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


async def _ask_owner(ownership: Ownership, request: Request, body: bytes) -> Response:
    """The owner's answer. Waits for the next owner while there is none. Raises ApiError."""
    deadline = time.monotonic() + NEXT_OWNER_S
    while not ownership.is_ending and time.monotonic() < deadline:
        if owner := ownership.owner:
            try:
                return await _ask(owner, request, body)
            except httpx.ConnectError:
                # It has ended, and the request did not reach it.
                pass
            except httpx.TransportError as error:
                if request.method not in READING:
                    raise ApiError(
                        "owner_lost",
                        "the API process that owns the proofs ended before it answered, and may"
                        " have done what was asked: look at /status, then ask again",
                        _OWNER_AGAIN_S,
                    ) from error
        await asyncio.sleep(LOOK_S)
    raise ApiError(
        "owner_lost", "no API process owns the proofs at the moment; ask again", _OWNER_AGAIN_S
    )


async def _ask(socket: str, request: Request, body: bytes) -> Response:
    """One attempt, on a new connection: a kept one may belong to a process that has ended."""
    scope = request.scope
    dropped = {*_HOP_BY_HOP, CLIENT, b"content-length"}
    headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
    peers = json.dumps([scope.get("client"), scope.get("server")])
    headers.append((CLIENT, peers.encode()))
    path = scope["raw_path"].removeprefix(scope.get("root_path", "").encode())
    target = path + b"?" + scope["query_string"] if scope["query_string"] else path
    url = httpx.URL("http://owner", raw_path=target)
    transport = httpx.AsyncHTTPTransport(uds=socket)
    timeout = httpx.Timeout(None, connect=NEXT_OWNER_S)
    # No proxy of the environment: it would get calls that never leave this machine.
    async with httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False) as client:
        asked = client.build_request(request.method, url, headers=headers, content=body)
        answer = await client.send(asked, stream=True)
        content = b"".join([part async for part in answer.aiter_raw()])
        await answer.aclose()
    response = Response(content, answer.status_code)
    kept = [(name.lower(), value) for name, value in answer.headers.raw]
    response.raw_headers = [(name, value) for name, value in kept if name not in _OWN_HEADERS]
    return response


def private_app(routers: list[APIRouter]) -> ASGIApp:
    """What an owner serves to the other processes."""
    app = FastAPI(openapi_url=None)
    for router in routers:
        app.include_router(router)

    async def with_client(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            named = [value for name, value in scope["headers"] if name == CLIENT]
            headers = [(name, value) for name, value in scope["headers"] if name != CLIENT]
            # Without the header the caller is no process of ours: it counts as another machine.
            peers = json.loads(named[0]) if named else (("0.0.0.0", 0), None)  # noqa: S104
            client, server = (None if each is None else tuple(each) for each in peers)
            scope = {**scope, "headers": headers, "client": client, "server": server}
        await app(scope, receive, send)

    return with_client
