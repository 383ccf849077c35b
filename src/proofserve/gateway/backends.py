"""The vLLM servers behind the gateway: their state, the choice of one, probes, and names in DNS."""

import asyncio
import hashlib
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from proofserve.gateway.connections import ConnectionPool
from proofserve.gateway.records import BackendSpec, GatewayPlan

log = logging.getLogger(__name__)
# Faults in a row after which a backend rests; its first and its longest rest, in seconds.
FAULTS = 3
REST_S = 2.0
LONGEST_REST_S = 60.0
# With prefix affinity, a backend may have this multiple of its even share of the requests.
IMBALANCE = 1.25
# Longest time for a step of a probe, seconds.
TIMEOUT_S = 5.0
# Failed probes in a row after which a backend is unhealthy; a single one may be chance.
FAILURES = 2
# Longest wait for DNS, and the time between two looks at backends that are to be removed; seconds.
ANSWER_S = 5.0
TICK_S = 0.5

# The addresses of a host name and port. Raises OSError if there is no answer, or an empty one.
Resolve = Callable[[str, int], Awaitable[Collection[str]]]


class Backend:
    """One backend and its state. ``models`` is None until the backend has listed them."""

    def __init__(self, spec: BackendSpec, pool: ConnectionPool, clock: Callable[[], float]) -> None:
        self.spec = spec
        self.name = spec.url
        self.pool = pool
        self.outstanding = 0
        self.healthy = True
        self.draining = False
        self.models: dict[str, dict[str, Any]] | None = None
        self.ejections = 0
        self.fault_count = 0
        self._clock = clock
        self._faults = 0
        self._rest_until = 0.0
        self._trial = False

    @property
    def resting(self) -> bool:
        """Whether it rests after faults, or one request tries it after a rest."""
        if self._faults < FAULTS:
            return False
        return self._trial or self._clock() < self._rest_until

    @property
    def up(self) -> bool:
        return self.healthy and not self.resting and not self.draining

    def serves(self, model: str | None) -> bool:
        """Whether it has the model. Until it has listed its models, it may have any."""
        return self.models is None or model is None or model in self.models

    def label(self, model: str | None) -> str:
        """``model`` as a label of metrics; "unknown" if the backend does not list it."""
        return model if model is not None and self.models and model in self.models else "unknown"

    def chosen(self) -> None:
        """Count a request to this backend. The first one after a rest is a trial."""
        self.outstanding += 1
        if self._faults >= FAULTS and self._clock() >= self._rest_until:
            self._trial = True

    def released(self) -> None:
        self.outstanding -= 1
        self._trial = False

    def worked(self) -> None:
        """Count an answer below 500: a 4xx is the client's fault."""
        self._faults = 0
        self._trial = False

    def failed(self) -> None:
        """Count a fault: a broken connection or a 5xx. After ``FAULTS`` in a row it rests."""
        self.fault_count += 1
        if self.resting and not self._trial:
            # The request was sent before the rest began: a crash under load counts as one fault.
            return
        self._faults += 1
        self._trial = False
        if self._faults >= FAULTS:
            self.ejections += 1
            rest = REST_S * 2 ** min(self._faults - FAULTS, 5)
            self._rest_until = self._clock() + min(rest, LONGEST_REST_S)


class BackendPool:
    """The backends as they are now. With ``affinity`` requests that begin alike share one."""

    def __init__(self, backends: Sequence[Backend], affinity: bool) -> None:
        self.backends = list(backends)
        self._affinity = affinity
        self._rotation = 0

    def named(self, name: str) -> Backend | None:
        return next((backend for backend in self.backends if backend.name == name), None)

    def knows(self, model: str | None) -> bool:
        """Whether a backend has the model; true while there is none, which may change soon."""
        for backend in self.backends:
            if backend.serves(model):
                return True
        return not self.backends

    def choose(
        self, model: str | None, prefix: bytes, tried: Collection[Backend]
    ) -> Backend | None:
        """The best backend that was not ``tried``; one that rests or is unhealthy if need be."""
        if len(self.backends) == 1:
            (only,) = self.backends
            return None if only in tried or only.draining or not only.serves(model) else only
        able = [b for b in self.backends if not b.draining and b not in tried and b.serves(model)]
        fit = [b for b in able if b.healthy and not b.resting] or able
        if not fit:
            return None
        if self._affinity and prefix:
            # Rendezvous hashing with a bound on the load: no earlier choice needs to be stored.
            weight = sum(backend.spec.weight for backend in fit)
            bound = IMBALANCE * (sum(backend.outstanding for backend in fit) + 1) / weight
            # Rounded up, so that the bounds add up to more than all requests: a backend has room.
            with_room = [b for b in fit if b.outstanding < math.ceil(bound * b.spec.weight)]
            return max(
                with_room,
                key=lambda b: hashlib.blake2b(prefix + b.name.encode(), digest_size=8).digest(),
            )
        # Backends with equal load take turns.
        self._rotation += 1
        start = self._rotation % len(fit)
        return min([*fit[start:], *fit[:start]], key=lambda b: b.outstanding / b.spec.weight)


def plain_client(spec: BackendSpec, key: str | None, timeout_s: float) -> httpx.AsyncClient:
    """A client that sends the backends' ``key`` and waits ``timeout_s`` for each step."""
    parts = urlsplit(spec.url)
    unix = parts.scheme == "unix"
    return httpx.AsyncClient(
        base_url="http://localhost" if unix else spec.url,
        transport=httpx.AsyncHTTPTransport(uds=parts.path) if unix else None,
        headers={"Authorization": f"Bearer {key}"} if key else None,
        timeout=timeout_s,
        # Loading the certificates takes a tenth of a second.
        verify=parts.scheme == "https",
    )


class Prober:
    def __init__(self, backend: Backend, interval_s: float, key: str | None) -> None:
        self._backend = backend
        self._interval_s = interval_s
        self._failures = 0
        self._lists_models = True
        self._http = plain_client(backend.spec, key, TIMEOUT_S)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self.run())

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self.ask()
            self._backend.pool.drop_idle(loop.time())
            await asyncio.sleep(self._interval_s)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._http.aclose()

    async def ask(self) -> None:
        """Probe once. Only the answer of ``/health`` decides whether the backend is healthy."""
        backend = self._backend
        try:
            (await self._http.get("/health")).raise_for_status()
        except httpx.HTTPError as error:
            self._failures += 1
            if self._failures == FAILURES:
                log.warning("backend %s is unhealthy: %r", backend.name, error)
                backend.healthy = False
            return
        if not backend.healthy:
            log.info("backend %s is healthy again", backend.name)
        self._failures = 0
        backend.healthy = True
        try:
            models = await self._http.get("/v1/models")
            models.raise_for_status()
            backend.models = {each["id"]: each for each in models.json()["data"]}
        except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError) as error:
            if self._lists_models:
                log.warning("backend %s does not list its models: %r", backend.name, error)
            self._lists_models = False
        else:
            self._lists_models = True


async def addresses(host: str, port: int) -> Collection[str]:
    """What the system's resolver knows. Raises OSError, and TimeoutError after ``ANSWER_S``."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(ANSWER_S):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}


@dataclass(eq=False, repr=False)
class Roster:
    """Keeps the backends of ``pool`` up to date; ``gone`` gets the name of a removed one."""

    _plan: GatewayPlan
    _pool: BackendPool
    _make: Callable[[BackendSpec], Backend]
    _gone: Callable[[str], None]
    _resolve: Resolve
    _probers: dict[Backend, Prober] = field(default_factory=dict, init=False)
    # Backends without an address in DNS any more, and whether an operator had drained them.
    _leaving: dict[Backend, bool] = field(default_factory=dict, init=False)
    _found: dict[str, frozenset[BackendSpec]] = field(default_factory=dict, init=False)
    _silent: set[str] = field(default_factory=set, init=False)

    async def start(self) -> None:
        """Probe the plan's backends, look the names up once, and go on probing."""
        await asyncio.gather(*map(self._probe, self._pool.backends), self.look())

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
            for backend in [each for each in self._leaving if not each.outstanding]:
                del self._leaving[backend]
                self._pool.backends.remove(backend)
                await self._probers.pop(backend).close()
                backend.pool.close()
                self._gone(backend.name)
                log.info("backend %s is removed", backend.name)

    async def close(self) -> None:
        while self._probers:
            _, prober = self._probers.popitem()
            await prober.close()

    async def look(self) -> None:
        """Look all names up: add new addresses, drain lost ones; without an answer all stay."""
        await asyncio.gather(*(self._look_up(name) for name in self._plan.names))
        found = {spec.url: spec for specs in self._found.values() for spec in specs}
        fixed = {spec.url for spec in self._plan.backends}
        for backend in self._pool.backends:
            if backend.name not in found and backend.name not in fixed:
                if backend not in self._leaving:
                    self._leaving[backend] = backend.draining
                    log.info("backend %s is no longer in DNS: no new requests", backend.name)
                # Each time: an operator may have undrained it meanwhile.
                backend.draining = True
            elif backend in self._leaving:
                backend.draining = self._leaving.pop(backend)
                log.info("backend %s is in DNS again", backend.name)
        known = {backend.name for backend in self._pool.backends}
        new = [self._make(spec) for url, spec in sorted(found.items()) if url not in known]
        await asyncio.gather(*map(self._probe, new))
        self._pool.backends += new
        for backend in new:
            log.info("backend %s is new", backend.name)

    async def _look_up(self, name: BackendSpec) -> None:
        parts = urlsplit(name.url)
        port = parts.port or 80
        try:
            found = await self._resolve(parts.hostname or "", port)
        except OSError as error:
            if name.url not in self._silent:
                why = error.strerror or f"no answer within {ANSWER_S:g} s"
                log.warning("no address of %s, the known ones stay: %s", name.url, why)
            self._silent.add(name.url)
            return
        self._silent.discard(name.url)
        self._found[name.url] = frozenset(
            BackendSpec(f"http://{f'[{each}]' if ':' in each else each}:{port}", name.weight)
            for each in found
        )

    async def _probe(self, backend: Backend) -> None:
        """Probe until ``close``. Returns once the models are known, before the first request."""
        prober = Prober(backend, self._plan.probe_interval, self._plan.backend_key)
        self._probers[backend] = prober
        await prober.ask()
        prober.start()
