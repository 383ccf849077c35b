"""One of several API processes owns the node: the lock of the outbox elects it.

The kernel frees the lock when its process ends, however that happens. The next process that takes
it opens the outbox and goes on with the open round, as a restarted server does (ADR 31). A file
beside the outbox says which process owns it, and where that one answers.
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from starlette.types import ASGIApp

from proofserve.api.node import Node
from proofserve.outbox.database import OutboxInUse, is_locked
from proofserve.rounds.errors import RoundsError
from proofserve.wiring.sockets import on_unix_socket

_logger = logging.getLogger(__name__)

# Seconds between two looks at the lock.
POLL_S = 0.25
# The longest wait of a starting process until one of this server owns the proofs, seconds.
START_S = 60.0
# Pause after a failed attempt to take a free outbox, seconds.
RETRY_S = 1.0

# A running node, made when this process has become the owner. The argument: whether another process
# of this server owned it before, whose round goes on.
StartNode = Callable[[bool], AbstractAsyncContextManager[Node]]


@dataclass(frozen=True, slots=True)
class OwnerAddress:
    """``server`` is the same in all API processes of one server: see ``this_server``.

    ``process`` is the owner's id, ``socket`` the path of its unix socket.
    """

    server: str
    process: int
    socket: str


def this_server() -> str:
    """The process that started this one and its siblings: its id, and its start in clock ticks.

    Ids alone repeat, in containers above all.
    """
    parent = os.getppid()
    # Field 22 of proc(5); the second one is a name in parentheses, which may hold spaces.
    fields = Path(f"/proc/{parent}/stat").read_text("utf-8").rpartition(")")[2].split()
    return f"{parent}-{fields[19]}"


def address_file(outbox: Path) -> Path:
    return outbox.with_name(f"{outbox.name}.owner")


def publish(outbox: Path, address: OwnerAddress) -> None:
    """Write the file in one step: another process reads the old address or the new one."""
    path = address_file(outbox)
    written = path.with_name(f"{path.name}.{address.process}")
    written.write_text(json.dumps(asdict(address)), "utf-8")
    os.replace(written, path)  # noqa: PTH105 - the same as Path.replace, which hides that it is atomic


def withdraw(outbox: Path) -> None:
    with suppress(OSError):
        address_file(outbox).unlink(missing_ok=True)


def read(outbox: Path) -> OwnerAddress | None:
    """The last published address; None without one. Its process may have been killed since."""
    try:
        return OwnerAddress(**json.loads(address_file(outbox).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class Ownership:
    """Whether this process owns the node, and where the process is that does.

    ``server`` is that of ``this_server``. ``private_app`` makes the application that the
    owner serves to the other processes.
    """

    def __init__(
        self, outbox: Path, server: str, start: StartNode, private_app: Callable[[Node], ASGIApp]
    ) -> None:
        self.node: Node | None = None
        self._outbox = outbox
        self._server = server
        self._start = start
        self._private_app = private_app
        self._ending = asyncio.Event()
        self._electing: asyncio.Task[None] | None = None

    @property
    def owner(self) -> OwnerAddress | None:
        """The address of this server's owner; None while there is none."""
        found = read(self._outbox)
        return found if found is not None and found.server == self._server else None

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
            await self._until_owned(self._electing)
            self._electing.add_done_callback(_report)
            yield self
        finally:
            await self.end()

    async def end(self) -> None:
        """Own nothing from now on: end the node, so that another process may take it at once."""
        self._ending.set()
        if self._electing is not None:
            await asyncio.wait({self._electing})

    async def _until_owned(self, electing: "asyncio.Task[None]") -> None:
        waited = 0.0
        while self.node is None and self.owner is None:
            if electing.done():
                electing.result()
            if waited > START_S:
                raise OutboxInUse(
                    f"another running server uses the outbox {self._outbox}: stop that server,"
                    " or give this one another file with POC_OUTBOX"
                )
            await asyncio.sleep(POLL_S)
            waited += POLL_S

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
                await self._until_free()
            except RoundsError as error:
                if not was_owned:
                    raise
                _logger.warning("this process cannot own the proofs, again in a second: %s", error)
                await self._pause(RETRY_S)

    async def _own(self, was_owned: bool) -> None:
        async with (
            self._start(was_owned) as node,
            on_unix_socket(self._private_app(node)) as socket,
        ):
            here = OwnerAddress(self._server, os.getpid(), str(socket))
            publish(self._outbox, here)
            self.node = node
            _logger.info("this API process (%d) owns the proofs", here.process)
            try:
                await self._ending.wait()
            finally:
                # New calls wait for the next owner: here they would see a round that stops.
                self.node = None
                withdraw(self._outbox)
            # Before the socket ends: calls that wait for jobs end with the jobs.
            await node.manager.aclose()

    async def _until_free(self) -> None:
        while not self._ending.is_set() and is_locked(self._outbox):
            await self._pause(POLL_S)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)


def _report(electing: "asyncio.Task[None]") -> None:
    if not electing.cancelled() and (error := electing.exception()) is not None:
        text = "this API process can own no proofs any more; restart the server"
        _logger.critical(text, exc_info=error)
