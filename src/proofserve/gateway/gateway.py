"""What the requests of one process share: routes, permits, deadlines, who got which answer."""

import asyncio
import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from proofserve.gateway import failures
from proofserve.gateway.answer import HOP_BY_HOP, CrossOrigin, Usage, Values, response_head
from proofserve.gateway.backends import Backend, BackendPool
from proofserve.gateway.connections import ConnectionPool, WriteBatch
from proofserve.gateway.failures import ErrorShape, Failure
from proofserve.gateway.limits import (
    Charge,
    Client,
    Clients,
    RequestFields,
    SharedBudgets,
    read_body,
    read_form,
)
from proofserve.gateway.metrics import GatewayTotals, gauge
from proofserve.gateway.records import BackendSpec, GatewayPlan
from proofserve.gateway.tracing import NO_TRACE, RequestTrace, Traces

# Weight of the latest permit in the average time that a permit is held.
LATEST_WEIGHT = 0.1
# How late a timeout may come, seconds. One timer for each request would cost more.
PERIOD_S = 0.05
# As long as a node keeps receipts by default.
KEEP_S = 7 * 86_400.0


# -- routes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """One path. A request has at least one of the fields ``prompts``; its body may be a ``form``.

    ``answer_id`` is what vLLM puts before a request's id to make that of the answer; empty if an
    answer has no receipt.
    """

    prompts: tuple[str, ...] = ()
    example: Any = "Hello"
    usage: Usage = Usage.LAST
    errors: ErrorShape = ErrorShape.OPENAI
    answer_id: bytes = b""
    form: bool = False


MESSAGES = [{"role": "user", "content": "Hello"}]
# Counting tokens and cutting text into them takes time of the server that streams chat, and no
# engine: such requests take permits, for milliseconds, and cost no tokens.
ROUTES: Mapping[bytes, Route] = {
    b"/v1/chat/completions": Route(("messages",), MESSAGES, answer_id=b"chatcmpl-"),
    b"/v1/completions": Route(("prompt", "prompt_embeds"), answer_id=b"cmpl-"),
    b"/v1/embeddings": Route(("input", "messages")),
    b"/v1/responses": Route(("input",)),
    b"/v1/messages": Route(
        ("messages",), MESSAGES, errors=ErrorShape.ANTHROPIC, answer_id=b"chatcmpl-"
    ),
    b"/v1/messages/count_tokens": Route(("messages",), MESSAGES, Usage.NONE, ErrorShape.ANTHROPIC),
    b"/v1/rerank": Route(("documents",), ["Hello"], Usage.FIRST),
    b"/v1/score": Route(("text_1", "queries", "data_1")),
    b"/v1/audio/transcriptions": Route(("file",), form=True),
    b"/tokenize": Route(("prompt", "messages"), usage=Usage.NONE),
    b"/detokenize": Route(("tokens",), [1], Usage.NONE),
}
# Any other path that the operator names.
OTHER = Route(usage=Usage.NONE, form=True)


class RelayTarget(NamedTuple):
    """Where a request goes: path and query as the client sent them, and the path's route."""

    url: bytes
    route: Route


# -- permits and deadlines -------------------------------------------------------------------------


class PendingRequest(Protocol):
    """A request that waits for a permit, and gives up in ``check`` after its deadline.

    ``now`` is the loop's clock in seconds. ``keep_alive``: its connection may serve another one.
    """

    keep_alive: bool

    def permit_granted(self) -> None: ...
    def check(self, now: float) -> None: ...
    def shut_down(self) -> None: ...


class Entry(enum.Enum):
    GRANTED = enum.auto()
    QUEUED = enum.auto()
    REFUSED = enum.auto()


class PermitQueue:
    """``limit`` permits, and at most ``queue_limit`` waiters. For one event loop."""

    def __init__(self, limit: int, queue_limit: int) -> None:
        self.limit = limit
        self.queue_limit = queue_limit
        self.in_use = 0
        self._queue: OrderedDict[PendingRequest, None] = OrderedDict()
        self._granting = False
        self._average_held = 0.0

    @property
    def expected_wait(self) -> float:
        """Expected wait of a new request, in seconds, from recent permit times."""
        return (len(self._queue) + 1) * self._average_held / self.limit

    @property
    def queued(self) -> int:
        return len(self._queue)

    def enter(self, waiter: PendingRequest) -> Entry:
        """Ask for a permit. A queued ``waiter`` gets it later, by ``permit_granted``."""
        if self.in_use < self.limit and not self._queue:
            self.in_use += 1
            return Entry.GRANTED
        if len(self._queue) >= self.queue_limit:
            return Entry.REFUSED
        self._queue[waiter] = None
        return Entry.QUEUED

    def abandon(self, waiter: PendingRequest) -> None:
        """Take ``waiter`` out of the queue. Raises KeyError if it is not there."""
        del self._queue[waiter]

    def leave(self, held: float) -> None:
        """Give back a permit that was ``held`` for seconds; the oldest waiter gets it."""
        self.in_use -= 1
        self._average_held += LATEST_WEIGHT * (held - self._average_held)
        # A waiter that fails at once calls this method again. Then the loop below grants the next
        # permit: a recursion could be as deep as the queue is long.
        if self._granting:
            return
        self._granting = True
        try:
            while self._queue and self.in_use < self.limit:
                waiter, _ = self._queue.popitem(last=False)
                self.in_use += 1
                waiter.permit_granted()
        finally:
            self._granting = False


class Deadlines:
    """Calls ``check`` of everything in ``watched``, twenty times a second."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.watched: set[PendingRequest] = set()
        self._timer: asyncio.TimerHandle | None = None
        # Set while nothing is watched, as of the latest check.
        self.idle = asyncio.Event()

    def start(self) -> None:
        self._timer = self._loop.call_later(PERIOD_S, self._check_all)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_all(self) -> None:
        # First of all: a check that raises must not be the last one.
        self.start()
        now = self._loop.time()
        for watched in list(self.watched):
            watched.check(now)
        if self.watched:
            self.idle.clear()
        else:
            self.idle.set()


class AnsweredRequests:
    """Which client got which answer from which backend, for the answers' receipts.

    Knows the newest ``most`` answers, each for ``keep_s`` seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float], keep_s: float = KEEP_S) -> None:
        self._most, self._clock, self._keep_s = most, clock, keep_s
        # Of an answer: the names of its client and its backend, and when it began. Oldest first.
        self._known: OrderedDict[bytes, tuple[str, str, float]] = OrderedDict()

    def add(self, route: Route, request_id: bytes, client: str, backend: str) -> None:
        """The answer to ``request_id`` on ``route`` began. An id of another client stays its."""
        if not route.answer_id or not self._most:
            return
        self._forget()
        response_id = route.answer_id + request_id
        known = self._known.get(response_id)
        if known is None or known[0] == client:
            self._known[response_id] = (client, backend, self._clock())
            self._known.move_to_end(response_id)
            if len(self._known) > self._most:
                self._known.popitem(last=False)

    def backend_of(self, response_id: str, client: str) -> str | None:
        """The backend that gave ``client`` this answer; None if it is not known or another's."""
        self._forget()
        found = self._known.get(response_id.encode(errors="replace"))
        return found[1] if found is not None and found[0] == client else None

    def __len__(self) -> int:
        return len(self._known)

    def _forget(self) -> None:
        oldest = self._clock() - self._keep_s
        while self._known and next(iter(self._known.values()))[2] < oldest:
            self._known.popitem(last=False)


class Connection(Protocol):
    """One connection of a client.

    ``write_paused``: the client reads more slowly than the backend writes. ``answered``: the
    exchange has ended; the connection may serve another if it is ``keep_alive``. ``abort`` cuts the
    connection, so that the client sees that its answer is not complete.
    """

    @property
    def write_paused(self) -> bool: ...
    def write(self, data: bytes) -> None: ...
    def answered(self, exchange: PendingRequest) -> None: ...
    def abort(self) -> None: ...


class Gateway(Collector):
    """Made inside a running event loop, and used in that loop only."""

    def __init__(self, plan: GatewayPlan, traces: Traces | None = None) -> None:
        self.plan = plan
        self._traces = traces
        self.routes = {**dict.fromkeys(plan.other_paths, OTHER), **ROUTES}
        self.timeouts = plan.timeouts
        self.loop = asyncio.get_running_loop()
        self.writes = WriteBatch(self.loop)
        self.admission = PermitQueue(plan.max_concurrent, plan.queue_limit)
        self.shared = SharedBudgets(plan.shared_limits) if plan.shared_limits else None
        new_window = self.shared.window if self.shared else None
        self.clients = Clients(plan.clients, self.loop.time, new_window)
        self.pool = BackendPool([self.backend(spec) for spec in plan.backends], plan.affinity)
        self.answered = AnsweredRequests(plan.remembered_answers, self.loop.time)
        self.cross_origin = CrossOrigin(plan.cors_origins)
        self.totals = GatewayTotals()
        self.deadlines = Deadlines(self.loop)
        self.draining = False
        self.connections: set[Connection] = set()
        key = plan.backend_key
        self.backend_lines = f"authorization: Bearer {key}\r\n".encode() if key else b""
        # Where the gateway has keys of its own, the backend must not see a client's key.
        hidden = {b"authorization", b"x-api-key"} if plan.clients or key else set()
        self.held_back = HOP_BY_HOP | hidden | (traces.replaced if traces is not None else set())
        self.metrics = CollectorRegistry()
        self.metrics.register(self)

    @property
    def expected_wait(self) -> float:
        """Seconds that a new request would wait for a permit, at most until its timeout."""
        return min(self.admission.expected_wait, self.timeouts.queue)

    def target_of(self, url: bytes) -> RelayTarget | None:
        """Where a POST to ``url`` is relayed; None if it is not."""
        route = self.routes.get(url) or self.routes.get(url.partition(b"?")[0])
        return RelayTarget(url, route) if route is not None else None

    def trace_of(self, url: bytes, values: Values) -> RequestTrace:
        return NO_TRACE if self._traces is None else self._traces.begin(url, values)

    def admit(
        self, route: Route, key: bytes, form: bool, body: bytes | bytearray
    ) -> tuple[Client, Charge, RequestFields] | Failure:
        """Whether a request may wait for a permit: its key, body and model, its key's limits.

        Returns its client, what is set aside of the client's budget, and what the body asks for.
        """
        client = self.clients.find(key)
        if client is None:
            return failures.UNAUTHORIZED
        try:
            fields = read_form(body) if form else read_body(body)
        except ValueError as error:
            return failures.INVALID_BODY.saying(str(error))
        if not self.pool.knows(fields.model):
            message = f"No backend serves the model {fields.model!r:.200}."
            return failures.UNKNOWN_MODEL.saying(message)
        # A file is no text: its bytes say nothing about tokens.
        size = None if route.usage is Usage.NONE else 0 if form else len(body)
        charge = client.admit(fields, size)
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
        for backend in self.pool.backends:
            backend.pool.close()

    def backend(self, spec: BackendSpec) -> Backend:
        pool = ConnectionPool(spec.url, self.timeouts.connect, self.loop, self.writes)
        return Backend(spec, pool, self.loop.time)

    def collect(self) -> Iterator[Metric]:
        """The metrics, for a scrape, which reads them in a thread."""
        permits, backends, loop = self.admission, self.pool.backends, self.loop
        yield gauge("in_flight", "Permits in use.", permits.in_use)
        yield gauge("permits", "Permits in all.", permits.limit)
        yield gauge("queued", "Requests that wait for a permit.", permits.queued)
        shared = self.shared is None or self.shared.up
        yield gauge("limits_shared", "0 if limits should be shared and are not.", shared)
        at_rest = "Tasks of the event loop; at rest always the same."
        yield gauge("tasks", at_rest, len(asyncio.all_tasks(loop)))
        clients = {(client.name,): client.in_flight for client in self.clients.all()}
        text = "Requests of a key, queued ones included."
        yield gauge("client_in_flight", text, clients, "client")
        in_flight = {(each.name,): each.outstanding for each in backends}
        yield gauge("backend_in_flight", "Requests at a backend.", in_flight, "backend")
        opened = {(each.name,): each.pool.opened for each in backends}
        yield gauge("backend_connections", "Open connections to a backend.", opened, "backend")
        up = {(each.name,): each.up for each in backends}
        yield gauge("backend_up", "Whether a backend takes requests.", up, "backend")
        yield from self.totals.collect()
