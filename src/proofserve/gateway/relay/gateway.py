"""Everything that the requests of one process share."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from prometheus_client import CollectorRegistry

from proofserve.gateway import failures
from proofserve.gateway.backends.batching import WriteBatch
from proofserve.gateway.backends.fleet import Backend, Fleet
from proofserve.gateway.backends.upstream import Pool
from proofserve.gateway.failures import Failure
from proofserve.gateway.headers import HOP_BY_HOP, CrossOrigin, response_head
from proofserve.gateway.limits.admission import PermitQueue
from proofserve.gateway.limits.clients import Charge, Client, Clients
from proofserve.gateway.limits.request_body import RequestBodyReader, RequestFields
from proofserve.gateway.limits.shared_budgets import SharedBudgets
from proofserve.gateway.metrics import GatewayCollector, GatewayTotals, Gauge
from proofserve.gateway.records import BackendSpec, GatewayPlan
from proofserve.gateway.relay.answered import AnsweredRequests
from proofserve.gateway.relay.deadlines import Deadlines


class Ended(Protocol):
    keep_alive: bool


class Connection(Protocol):
    """One connection of a client.

    ``write_paused``: the client reads more slowly than the backend writes. ``answered``: the
    exchange has ended; the connection may serve another if it is ``keep_alive``. ``abort`` cuts the
    connection, so that the client sees that its answer is not complete.
    """

    @property
    def write_paused(self) -> bool: ...
    def write(self, data: bytes) -> None: ...
    def answered(self, exchange: Ended) -> None: ...
    def abort(self) -> None: ...


class Gateway:
    """Made inside a running event loop, and used in that loop only."""

    def __init__(self, plan: GatewayPlan) -> None:
        self.plan = plan
        self.timeouts = plan.timeouts
        self.loop = asyncio.get_running_loop()
        self.writes = WriteBatch(self.loop)
        self.admission = PermitQueue(plan.max_concurrent, plan.queue_limit)
        self.shared = SharedBudgets(plan.shared_limits) if plan.shared_limits else None
        new_window = self.shared.window if self.shared else None
        self.clients = Clients(plan.clients, self.loop.time, new_window)
        self.fleet = Fleet([self.backend(spec) for spec in plan.backends], plan.affinity)
        self.body_reader = RequestBodyReader()
        self.answered = AnsweredRequests(plan.remembered_answers, self.loop.time)
        self.cross_origin = CrossOrigin(plan.cors_origins)
        self.totals = GatewayTotals()
        self.deadlines = Deadlines(self.loop)
        self.draining = False
        self.connections: set[Connection] = set()
        key = plan.backend_key
        self.backend_lines = f"authorization: Bearer {key}\r\n".encode() if key else b""
        # Where the gateway has keys of its own, the backend must not see a client's key.
        hidden = {b"authorization"} if plan.clients or key else set()
        self.held_back = HOP_BY_HOP | hidden
        self.metrics = CollectorRegistry()
        self.metrics.register(GatewayCollector(self.totals, self._gauges()))

    @property
    def expected_wait(self) -> float:
        """Seconds that a new request would wait for a permit, at most until its timeout."""
        return min(self.admission.expected_wait, self.timeouts.queue)

    def admit(
        self, key: bytes, body: bytes | bytearray
    ) -> tuple[Client, Charge, RequestFields] | Failure:
        """Whether a request may wait for a permit: its key, body and model, its key's limits.

        Returns its client, what is set aside of the client's budget, and what the body asks for.
        """
        client = self.clients.find(key)
        if client is None:
            return failures.UNAUTHORIZED
        try:
            fields = self.body_reader.read(body)
        except ValueError as error:
            return failures.INVALID_BODY.saying(str(error))
        if not self.fleet.knows(fields.model):
            message = f"No backend serves the model {fields.model!r:.200}."
            return failures.UNKNOWN_MODEL.saying(message)
        charge = client.admit(fields, len(body))
        if isinstance(charge, Failure):
            client.refused[charge.code] += 1
            return charge
        return client, charge, fields

    def queue_full(self) -> Failure:
        """The refusal of a request for which there is no permit and no place in the queue."""
        failure = failures.QUEUE_FULL
        if not self.admission.queue_limit:
            failure = failure.saying("All permits are in use, and queueing is off.")
        return failure.after(self.expected_wait)

    def client_head(self, head: bytes, own: bytes, origin: bytes | None, keep_alive: bool) -> bytes:
        if self.cross_origin.configured:
            head = self.cross_origin.strip(head)
            own += self.cross_origin.lines(origin)
        return response_head(head, own, keep_alive)

    def close(self) -> None:
        for connection in self.connections:
            connection.abort()
        self.deadlines.stop()
        for backend in self.fleet.backends:
            backend.pool.close()

    def backend(self, spec: BackendSpec) -> Backend:
        pool = Pool(spec.url, self.timeouts.connect, self.loop, self.writes)
        return Backend(spec, pool, self.loop.time)

    def _limits_shared(self) -> bool:
        return self.shared is None or self.shared.up

    def _gauges(self) -> list[Gauge]:
        def single(name: str, text: str, read: Callable[[], float]) -> Gauge:
            return name, text, [], lambda: {(): read()}

        def each(name: str, text: str, read: Callable[[Backend], float]) -> Gauge:
            return name, text, ["backend"], lambda: {(b.name,): read(b) for b in backends}

        def in_flight() -> dict[tuple[str, ...], float]:
            return {(client.name,): client.in_flight for client in self.clients.all()}

        permits, backends, loop = self.admission, self.fleet.backends, self.loop
        at_rest = "Tasks of the event loop; at rest always the same."
        return [
            single("in_flight", "Permits in use.", lambda: permits.in_use),
            single("permits", "Permits in all.", lambda: permits.limit),
            single("queued", "Requests that wait for a permit.", lambda: permits.queued),
            single(
                "limits_shared", "0 if limits should be shared and are not.", self._limits_shared
            ),
            single("tasks", at_rest, lambda: len(asyncio.all_tasks(loop))),
            ("client_in_flight", "Requests of a key, queued ones included.", ["client"], in_flight),
            each("backend_in_flight", "Requests at a backend.", lambda b: b.outstanding),
            each("backend_connections", "Open connections to a backend.", lambda b: b.pool.opened),
            each("backend_up", "Whether a backend takes requests.", lambda b: b.up),
        ]
