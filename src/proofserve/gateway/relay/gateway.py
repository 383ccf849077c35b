"""Everything that the requests of one process share."""

import asyncio

from prometheus_client import CollectorRegistry

from proofserve.gateway import failures
from proofserve.gateway.backends.batching import WriteBatch
from proofserve.gateway.backends.fleet import Fleet
from proofserve.gateway.failures import Failure
from proofserve.gateway.headers import HOP_BY_HOP, CrossOrigin, response_head
from proofserve.gateway.limits.admission import PermitQueue
from proofserve.gateway.limits.clients import Clients
from proofserve.gateway.limits.request_body import RequestBodyReader
from proofserve.gateway.metrics import GatewayCollector, GatewayTotals, Gauge
from proofserve.gateway.records import GatewayPlan
from proofserve.gateway.relay.connection import Connection
from proofserve.gateway.relay.deadlines import Deadlines
from proofserve.web.request_ids import RequestIds


class Gateway:
    """Made inside a running event loop, and used in that loop only."""

    def __init__(self, plan: GatewayPlan) -> None:
        self.plan = plan
        self.timeouts = plan.timeouts
        self.loop = asyncio.get_running_loop()
        self.writes = WriteBatch(self.loop)
        self.admission = PermitQueue(plan.max_concurrent, plan.queue_limit)
        self.clients = Clients(plan.clients, self.loop.time)
        self.fleet = Fleet.connecting(plan, self.loop, self.writes)
        self.body_reader = RequestBodyReader()
        self.ids = RequestIds()
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

    def queue_full(self) -> Failure:
        """The refusal of a request for which there is no permit and no place in the queue."""
        failure = failures.QUEUE_FULL
        if not self.admission.queue_limit:
            failure = failure.saying("All permits are in use, and queueing is off.")
        return failure.after(self.expected_wait)

    def client_head(self, head: bytes, own: bytes, origin: bytes | None, keep_alive: bool) -> bytes:
        """A backend's ``head`` as the client gets it, with ``own`` lines."""
        if self.cross_origin.configured:
            head = self.cross_origin.strip(head)
            own += self.cross_origin.lines(origin)
        return response_head(head, own, keep_alive)

    def close(self) -> None:
        """Cut all connections of clients, and close the idle ones to backends."""
        for connection in self.connections:
            connection.abort()
        self.deadlines.stop()
        for backend in self.fleet.backends:
            backend.pool.close()

    def _gauges(self) -> list[Gauge]:
        admission, fleet = self.admission, self.fleet.backends
        return [
            ("in_flight", "Permits in use.", [], lambda: {(): admission.in_use}),
            ("permits", "Permits in all.", [], lambda: {(): admission.limit}),
            ("queued", "Requests that wait for a permit.", [], lambda: {(): admission.queued}),
            ("tasks", "Tasks of the event loop; at rest always the same.", [], self._tasks),
            (
                "client_in_flight",
                "Requests of a key, queued ones included.",
                ["client"],
                lambda: {(client.name,): client.in_flight for client in self.clients.all()},
            ),
            (
                "backend_in_flight",
                "Requests at a backend.",
                ["backend"],
                lambda: {(each.name,): each.outstanding for each in fleet},
            ),
            (
                "backend_connections",
                "Open connections to a backend.",
                ["backend"],
                lambda: {(each.name,): each.pool.opened for each in fleet},
            ),
            (
                "backend_up",
                "Whether a backend takes requests.",
                ["backend"],
                lambda: {
                    (each.name,): each.healthy and not each.resting and not each.draining
                    for each in fleet
                },
            ),
        ]

    def _tasks(self) -> dict[tuple[str, ...], float]:
        return {(): len(asyncio.all_tasks(self.loop))}
