"""The backends of a gateway as they come and go: by name through DNS, each with its prober."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection
from urllib.parse import urlsplit

from proofserve.gateway.backends.fleet import Backend, Fleet
from proofserve.gateway.backends.prober import Prober
from proofserve.gateway.records import BackendSpec, GatewayPlan

log = logging.getLogger(__name__)
# Longest wait for DNS, and the time between two looks at backends that are to be removed; seconds.
ANSWER_S = 5.0
TICK_S = 0.5

# The addresses of a host name and port. Raises OSError if there is no answer, or an empty one.
Resolve = Callable[[str, int], Awaitable[Collection[str]]]


async def addresses(host: str, port: int) -> Collection[str]:
    """What the system's resolver knows. Raises OSError, and TimeoutError after ``ANSWER_S``."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(ANSWER_S):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}


class Roster:
    """Keeps the backends of ``fleet`` up to date until ``close``.

    ``make`` makes a backend, and ``gone`` is called with the name of a removed one.
    """

    def __init__(
        self,
        plan: GatewayPlan,
        fleet: Fleet,
        make: Callable[[BackendSpec], Backend],
        gone: Callable[[str], None],
        resolve: Resolve,
    ) -> None:
        self._plan, self._fleet = plan, fleet
        self._make, self._gone, self._resolve = make, gone, resolve
        self._probers: dict[Backend, tuple[Prober, asyncio.Task[None] | None]] = {}
        # Backends without an address in DNS any more, and whether an operator had drained them.
        self._leaving: dict[Backend, bool] = {}
        self._found: dict[str, frozenset[BackendSpec]] = {}
        self._silent: set[str] = set()

    async def start(self) -> None:
        """Probe the plan's backends, look the names up once, and go on probing."""
        probers = {backend: self._prober(backend) for backend in self._fleet.backends}
        await asyncio.gather(*(prober.ask() for prober in probers.values()), self.look())
        for backend, prober in probers.items():
            self._keep_probing(backend, prober)

    async def run(self) -> None:
        """Look the names up for ever, and remove backends that have left and are idle."""
        if not self._plan.names:
            return
        loop = asyncio.get_running_loop()
        looked = loop.time()
        while True:
            await asyncio.sleep(min(TICK_S, self._plan.lookup_interval))
            if loop.time() - looked >= self._plan.lookup_interval:
                looked = loop.time()
                await self.look()
            await self.remove_idle()

    async def close(self) -> None:
        for backend in list(self._probers):
            await self._end_probing(backend)

    async def look(self) -> None:
        """Look all names up: add new addresses, and drain those that are gone.

        A name that has no answer keeps the addresses of its last one.
        """
        await asyncio.gather(*(self._look_up(name) for name in self._plan.names))
        found = {spec.url: spec for specs in self._found.values() for spec in specs}
        fixed = {spec.url for spec in self._plan.backends}
        for backend in self._fleet.backends:
            if backend.name not in found and backend.name not in fixed:
                self._leave(backend)
            elif backend in self._leaving:
                backend.draining = self._leaving.pop(backend)
                log.info("backend %s is in DNS again", backend.name)
        known = {backend.name for backend in self._fleet.backends}
        new = [spec for url, spec in sorted(found.items()) if url not in known]
        self._fleet.backends += await asyncio.gather(*map(self._probed, new))

    async def remove_idle(self) -> None:
        """Remove the backends that have left and have no request any more."""
        for backend in [each for each in self._leaving if not each.outstanding]:
            del self._leaving[backend]
            self._fleet.backends.remove(backend)
            await self._end_probing(backend)
            backend.pool.close()
            self._gone(backend.name)
            log.info("backend %s is removed", backend.name)

    async def _look_up(self, name: BackendSpec) -> None:
        parts = urlsplit(name.url)
        port = parts.port or 80
        try:
            found = await self._resolve(parts.hostname or "", port)
        except OSError as error:
            if name.url not in self._silent:
                log.warning("no address of %s, the known ones stay: %s", name.url, _why(error))
            self._silent.add(name.url)
            return
        self._silent.discard(name.url)
        self._found[name.url] = frozenset(
            BackendSpec(f"http://{f'[{each}]' if ':' in each else each}:{port}", name.weight)
            for each in found
        )

    def _leave(self, backend: Backend) -> None:
        if backend not in self._leaving:
            self._leaving[backend] = backend.draining
            log.info("backend %s is no longer in DNS: no new requests", backend.name)
        # Each time: an operator may have undrained it meanwhile.
        backend.draining = True

    async def _probed(self, spec: BackendSpec) -> Backend:
        """A new backend, probed once, so that its first request finds its models known."""
        backend = self._make(spec)
        prober = self._prober(backend)
        await prober.ask()
        self._keep_probing(backend, prober)
        log.info("backend %s is new", backend.name)
        return backend

    def _prober(self, backend: Backend) -> Prober:
        prober = Prober(backend, self._plan.probe_interval, self._plan.backend_key)
        self._probers[backend] = prober, None
        return prober

    def _keep_probing(self, backend: Backend, prober: Prober) -> None:
        self._probers[backend] = prober, asyncio.create_task(prober.run())

    async def _end_probing(self, backend: Backend) -> None:
        prober, task = self._probers.pop(backend)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await prober.close()


def _why(error: OSError) -> str:
    return error.strerror or f"no answer within {ANSWER_S:g} s"
