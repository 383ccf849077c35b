"""A fleet on this machine: database, controllers behind one address, members, workers, receiver."""

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import httpx

from endurance.fleet import programs
from endurance.fleet.postgres import Postgres, postgres
from endurance.fleet.processes import ForkedProcess, ForkedServer
from proofserve.remote.http import wait_until
from proofserve.wiring.launch import free_port

# How long a call of a member's engine takes, in seconds.
CALL_S = 0.2
# The same of a worker's engine: a job takes four calls, so that kills meet jobs in their middle.
WORKER_CALL_S = 0.12
# The nonces of a sample; an honest member is cleared after ten of them.
SAMPLE = 12
JOINING_S = 60.0
_READ = 65_536
_MEMBER = {
    "enabled": True,
    "callback_interval_sec": 0.5,
    # What is not delivered waits: at the end every proof must be in the fleet's database.
    "callback_max_retries": 0,
    # The account compares every result with the file, so nothing may be deleted.
    "outbox_keep_days": 0,
}
# Without a conviction's consequences, because a member that is cordoned stops to prove.
_POLICY = f"""
[default]
every_sec = 1
nonces = {SAMPLE}
dist_threshold = 0.01
p_mismatch = 0.001
conviction = "mark"
"""
_CONTROLLER = ("--callback-max-retries", "0", "--lost-after-sec", "3", "--stop-wait-sec", "5")


class Member(ForkedServer):
    """A node over the fake engine with an outbox of its own. A cheat sends wrong vectors."""

    def __init__(self, folder: Path, name: str, cheats: bool) -> None:
        super().__init__(folder, name, programs.member)
        self.outbox = folder / f"{name}.sqlite"
        self.cheats = cheats

    def serve(self, *, resume: bool) -> None:
        settings: dict[str, Any] = {**_MEMBER, "outbox": self.outbox, "resume": resume}
        self.start(CALL_S, settings, self.cheats)


class Front:
    """One address in front of several controllers, as a load balancer of an operator has it.

    It passes each connection on to the next of ``ports`` that accepts one, until the context ends.
    A connection ends with the controller that it was passed on to.
    """

    def __init__(self, port: int, ports: Sequence[int]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._ports = itertools.cycle(ports)
        self._tries = len(ports)
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="front")

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *_error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", self._port)

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task(self._loop)}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found = await self._connect()
        if found is not None:
            theirs, to_them = found
            copies = (_copy(reader, to_them), _copy(theirs, writer))
            both = [asyncio.create_task(each) for each in copies]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in both:
                    each.cancel()
                to_them.close()
        writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        for _ in range(self._tries):
            with suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", next(self._ports))
        return None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_READ):
            writer.write(data)
            await writer.drain()


class FleetDeployment:
    """Two controllers and PostgreSQL, or one controller and an SQLite file without ``server``.

    ``members`` take part, ``away`` were replaced by others. With ``workers`` members are verified,
    and one of the first members cheats.
    """

    def __init__(self, folder: Path, server: Postgres | None, members: int, workers: int) -> None:
        self._folder = folder
        self._made = 0
        self._running = ExitStack()
        self.server = server
        self.database = server.database() if server else str(folder / "fleet.sqlite")
        count = 2 if server else 1
        self.controllers = [
            ForkedServer(folder, f"controller-{number}", programs.controller)
            for number in range(count)
        ]
        self.front = Front(free_port(), [each.port for each in self.controllers])
        self.receiver = ForkedServer(folder, "receiver", programs.receiver)
        self.received = folder / "received.sqlite"
        self.workers = [
            ForkedProcess(folder, f"verifier-{number}", programs.worker, "takes jobs of")
            for number in range(workers)
        ]
        self.members = [
            self._new_member(cheats=workers > 0 and number == 0) for number in range(members)
        ]
        self.away: list[Member] = []
        self._listed = [each.url for each in self.members]

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            starting.enter_context(self.front)
            starting.enter_context(self.receiver).start(self.received)
            for member in self.members:
                starting.enter_context(member).serve(resume=False)
            for controller in self.controllers:
                starting.enter_context(controller)
                self.start_controller(controller)
            for worker in self.workers:
                self.start_worker(starting.enter_context(worker))
            self._running = starting.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._running.close()

    @property
    def outboxes(self) -> list[Path]:
        """The files of all members that ever were."""
        return [each.outbox for each in (*self.members, *self.away)]

    @property
    def cheats(self) -> frozenset[str]:
        """The URLs of the members that cheat."""
        return frozenset(each.url for each in (*self.members, *self.away) if each.cheats)

    def start_worker(self, worker: ForkedProcess) -> None:
        """Start it and wait until it takes jobs. Raises ServerFailed.

        It has another name in the database each time. While the database is gone it would end.
        """
        worker.start(self.database, worker.name, WORKER_CALL_S)

    def start_controller(self, controller: ForkedServer) -> None:
        options = ["--database", self.database, "--public-url", self.front.url, *_CONTROLLER]
        if self.workers:
            file = self._folder / "policy.toml"
            file.write_text(_POLICY)
            options += ["--policy", str(file)]
        for url in self._listed:
            options += ["--member", url]
        controller.start(*options)

    def join(self) -> Member:
        """Start another member, and have it join. Raises TooSlowError."""
        member = self._running.enter_context(self._new_member())
        member.serve(resume=False)
        self.members.append(member)

        def joins() -> bool:
            body = {"url": member.url, "name": member.name}
            try:
                http = self.controllers[0].http
                return http.post("/api/v1/fleet/members", json=body).is_success
            except httpx.TransportError:
                return False

        wait_until(joins, f"{member.name} to join", JOINING_S)
        return member

    def _new_member(self, *, cheats: bool = False) -> Member:
        self._made += 1
        return Member(self._folder, f"member-{self._made}", cheats)


@contextmanager
def deployed(
    folder: Path, members: int, workers: int, *, with_postgres: bool
) -> Iterator[FleetDeployment]:
    """A deployment that has not been started; PostgreSQL runs until the context ends.

    Raises NoPostgres where there are no programs for it.
    """
    with ExitStack() as stack:
        server = stack.enter_context(postgres()) if with_postgres else None
        yield FleetDeployment(folder, server, members, workers)
