"""Everything that the requests of one process share."""

import asyncio

from prometheus_client import CollectorRegistry

from proofserve.gateway.backends.batching import WriteBatch
from proofserve.gateway.backends.fleet import Backend, Fleet
from proofserve.gateway.backends.upstream import Pool
from proofserve.gateway.limits.admission import PermitQueue
from proofserve.gateway.limits.clients import Clients
from proofserve.gateway.limits.request_body import RequestBodyReader
from proofserve.gateway.metrics import GatewayCollector, GatewayTotals, Gauge
from proofserve.gateway.records import BackendSpec, GatewayPlan
from proofserve.gateway.relay.connection import Connection
from proofserve.gateway.relay.deadlines import Deadlines
from proofserve.gateway.relay.headers import HOP_BY_HOP, CrossOrigin
from proofserve.web.request_ids import RequestIds


class Gateway:
    """Made inside a running event loop, which it then belongs to."""

    def __init__(self, plan: GatewayPlan) -> None:
        self.plan = plan
        self.loop = asyncio.get_running_loop()
        self.writes = WriteBatch(self.loop)
        self.admission = PermitQueue(plan.max_concurrent, plan.queue_limit)
        self.clients = Clients(plan.clients, self.loop.time)
        self.fleet = Fleet([self._backend(spec) for spec in plan.backends], plan.affinity)
        self.orders = RequestBodyReader()
        self.ids = RequestIds()
        self.cross_origin = CrossOrigin(plan.cors_origins)
        self.tally = GatewayTotals()
        self.watch = Deadlines(self.loop)
        self.draining = False
        self.connections: set[Connection] = set()
        key = plan.backend_key
        self.backend_lines = f"authorization: Bearer {key}\r\n".encode() if key else b""
        # Where the gateway has keys of its own, a client's key is none of the backend's business.
        hidden = {b"authorization"} if plan.clients or key else set()
        self.held_back = HOP_BY_HOP | hidden
        self.metrics = CollectorRegistry()
        self.metrics.register(GatewayCollector(self.tally, self._gauges()))

    def _backend(self, spec: BackendSpec) -> Backend:
        pool = Pool(spec.url, self.plan.timeouts.connect, self.loop, self.writes)
        return Backend(spec, pool, self.loop.time)

    def close(self) -> None:
        """Let go of everybody that is still there, and of everything idle."""
        for connection in self.connections:
            connection.abort()
        self.watch.stop()
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
