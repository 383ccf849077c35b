"""One request and its answer. However it ends, one method frees everything (ADR 11).

An exchange owns its client's charge, its permit, its place at a backend and the connection to it.
All its methods are callbacks of one event loop; none of them waits.
"""

import enum
import math
from collections.abc import Mapping, Sequence

from proofserve.gateway import failures
from proofserve.gateway.answer import BackendResponse, Header, Values, request_head
from proofserve.gateway.backends import Backend
from proofserve.gateway.connections import Upstream
from proofserve.gateway.failures import Failure
from proofserve.gateway.gateway import Connection, Entry, Gateway, RelayTarget
from proofserve.gateway.limits import NOTHING, Client
from proofserve.web import key_of, request_id_of

# Backends that one request may try.
MOST_BACKENDS = 3


class Stage(enum.IntEnum):
    """What an exchange waits for."""

    RECEIVING = 0  # the body of the request
    PIPELINED = 1  # the answer to an earlier request of the same connection
    QUEUED = 2  # a permit
    CONNECTING = 3  # a connection to the chosen backend; from here on the exchange has a permit
    WAITING = 4  # the head of the backend's answer
    RELAYING = 5  # the rest of the answer
    ENDED = 6  # nothing: all that it held is free


class StageMove(enum.IntEnum):
    HOLD = 0  # an earlier request of the connection is not answered yet
    RESUME = 1  # all earlier requests of the connection are answered
    QUEUE = 2  # every permit is in use
    GRANT = 3  # the exchange gets a permit
    SEND = 4  # the connection stands, and the request leaves on it
    RETRY = 5  # the same or another backend is tried again
    RELAY = 6  # the head of the answer goes to the client
    END = 7  # the answer is complete, a failure is told, or the client has left


class IllegalMove(RuntimeError):
    """A move that the stage does not allow: a fault of the gateway's own."""


# One look-up of a member costs more than a comparison with it, and a request does a dozen of them.
RECEIVING, PIPELINED, QUEUED, CONNECTING, WAITING, RELAYING, ENDED = Stage
HOLD, RESUME, QUEUE, GRANT, SEND, RETRY, RELAY, END = StageMove

# Every legal move (ADR 18), a line for each: from which stage it leads to which.
TABLE: Mapping[StageMove, Mapping[Stage, Stage]] = {
    HOLD: {RECEIVING: PIPELINED},
    RESUME: {PIPELINED: RECEIVING},
    QUEUE: {RECEIVING: QUEUED},
    GRANT: {RECEIVING: CONNECTING, QUEUED: CONNECTING},
    SEND: {CONNECTING: WAITING},
    RETRY: {CONNECTING: CONNECTING, WAITING: CONNECTING},
    RELAY: {WAITING: RELAYING},
    END: dict.fromkeys((RECEIVING, PIPELINED, QUEUED, CONNECTING, WAITING, RELAYING), ENDED),
}


def step(stage: Stage, move: StageMove) -> Stage:
    """The stage after ``move``. Raises IllegalMove."""
    try:
        return TABLE[move][stage]
    except KeyError:
        raise IllegalMove(f"{move.name} in stage {stage.name}") from None


class Exchange:
    def __init__(
        self,
        gateway: Gateway,
        connection: Connection,
        target: RelayTarget,
        headers: Sequence[Header],
        values: Values,
        keep_alive: bool,
    ) -> None:
        self.keep_alive = keep_alive and not gateway.draining
        # uvicorn reads this attribute of its current cycle.
        self.response_complete = False
        # If set, the answer of the gateway; the body does not matter.
        self.refusal: Failure | None = None
        self._gateway = gateway
        self._connection = connection
        self._target = target
        self._headers = headers
        self._value_of = value_of = values.get
        self._body: bytes | bytearray = b""
        self._stage = RECEIVING
        # Of the request, then of its wait for a permit, then of its time with the permit.
        self._began = gateway.loop.time()
        # When the request left for the backend.
        self._sent = 0.0
        self._client: Client | None = None
        self._charge = NOTHING
        # The backend at which it has a place, the connection to it, and backends that failed.
        self._backend: Backend | None = None
        self._upstream: Upstream | None = None
        self._tried: tuple[Backend, ...] = ()
        # What chooses the backend.
        self._model: str | None = None
        self._prefix = b""
        self._answer: BackendResponse | None = None
        self._paused = False
        self._trace = gateway.trace_of(target.url, values)
        self._request_id = request_id_of(value_of(b"x-request-id"))
        self._id_line = b"x-request-id: " + self._request_id + b"\r\n"
        if int(value_of(b"content-length", b"0")) > gateway.plan.max_body_bytes:
            self.refusal = failures.BODY_TOO_LARGE
        gateway.deadlines.watched.add(self)

    @property
    def expects_continue(self) -> bool:
        return self._value_of(b"expect", b"").lower() == b"100-continue"

    # -- the client's side -------------------------------------------------------------------

    def refuse(self, failure: Failure) -> None:
        """Answer with ``failure`` once the body has come; none of it is kept."""
        self.refusal = failure
        self._body = b""

    def body_received(self, data: bytes) -> None:
        if self.refusal is not None:
            return
        if not self._body:
            self._body = data
        elif isinstance(self._body, bytearray):
            self._body += data
        else:
            # Adding to bytes would copy a large body once for each of its parts.
            self._body = bytearray(self._body) + data
        if len(self._body) > self._gateway.plan.max_body_bytes:
            self.refuse(failures.BODY_TOO_LARGE)

    def hold(self) -> None:
        """An earlier request of the connection is not answered yet: no deadline runs."""
        self._stage = step(self._stage, HOLD)

    def resume_receiving(self) -> None:
        self._began = self._gateway.loop.time()
        self._stage = step(self._stage, RESUME)

    def start(self) -> None:
        """The body is complete, and all earlier requests of the connection are answered."""
        if failure := self.refusal or self._admit():
            self._fail(failure)

    def client_gone(self) -> None:
        if self._stage is not ENDED:
            self._end("client_left")

    def pause(self) -> None:
        self._paused = True
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        self._paused = False
        if self._answer is not None:
            self._answer.last = self._gateway.loop.time()
        if self._upstream is not None:
            self._upstream.resume()

    # -- admission ---------------------------------------------------------------------------

    def _admit(self) -> Failure | None:
        gateway = self._gateway
        if gateway.draining:
            self.keep_alive = False
            return failures.SHUTTING_DOWN
        value_of = self._value_of
        key = key_of(value_of(b"authorization", b"")) or value_of(b"x-api-key", b"")
        route = self._target.route
        kind = value_of(b"content-type", b"") if route.form else b""
        form = kind.lower().startswith(b"multipart/form-data")
        found = gateway.admit(route, key, form, self._body)
        if isinstance(found, Failure):
            return found
        self._client, self._charge, fields = found
        self._model = fields.model
        if gateway.plan.affinity:
            self._prefix = fields.beginning()
        self._began = gateway.loop.time()
        self._trace.queued(self._client.name, fields.model)
        entry = gateway.admission.enter(self)
        if entry is Entry.GRANTED:
            self.permit_granted()
        elif entry is Entry.QUEUED:
            self._stage = step(self._stage, QUEUE)
        else:
            return gateway.queue_full()
        return None

    def permit_granted(self) -> None:
        gateway = self._gateway
        now = gateway.loop.time()
        gateway.totals.wait.observe(now - self._began)
        self._began = now
        self._stage = step(self._stage, GRANT)
        self._trace.granted()
        if (backend := self._choose()) is not None:
            self._connect(backend)
        else:
            self._fail(failures.NO_BACKEND)

    # -- the backend's side ------------------------------------------------------------------

    def _choose(self) -> Backend | None:
        """Exchange the place for one at the best backend not tried yet; None if there is none."""
        before, tried = self._backend, self._tried
        if before is not None:
            tried = (*tried, before)
            if len(tried) >= MOST_BACKENDS:
                return None
        backend = self._gateway.pool.choose(self._model, self._prefix, tried)
        if backend is not None:
            self._release()
            self._backend, self._tried = backend, tried
            backend.chosen()
        return backend

    def _release(self) -> None:
        backend, upstream = self._backend, self._upstream
        self._backend = self._upstream = None
        if upstream is not None:
            upstream.release()
        if backend is not None:
            backend.released()

    def _connect(self, backend: Backend, fresh: bool = False) -> None:
        self._trace.tried(backend.name)
        backend.pool.acquire(self, fresh)

    def connected(self, upstream: Upstream) -> None:
        """Send the request, if it has not ended meanwhile."""
        gateway, body, backend = self._gateway, self._body, self._backend
        if backend is None:
            upstream.return_unused()
            return
        self._upstream = upstream
        self._stage = step(self._stage, SEND)
        self._sent = gateway.loop.time()
        own = self._id_line + gateway.backend_lines + self._trace.lines
        host, dropped = backend.pool.host, gateway.held_back
        head = request_head(self._target.url, host, self._headers, dropped, len(body), own)
        upstream.send(self, head, body)

    def connect_failed(self, failure: Failure) -> None:
        if self._stage is not ENDED:
            self._retry_or_fail(failure)

    def answer_begins(self, status: int, head: bytes, data: bytes, complete: bool) -> None:
        """Pass the head on, unless another backend may do better."""
        if status >= 500 and self._retry("backend_error"):
            return
        gateway, client, backend = self._gateway, self._client, self._backend
        if client is None or backend is None:
            raise RuntimeError("an answer came without a backend")
        self._stage = step(self._stage, RELAY)
        now = gateway.loop.time()
        if status < 500:
            backend.worked()
        series = gateway.totals.series[backend.name, backend.label(self._model)]
        series.first.observe(now - self._began)
        self._trace.answered(status)
        route = self._target.route
        self._answer = answer = BackendResponse(status, head, data, series, now, route.usage)
        if self._upstream is not None and self._upstream.until_close:
            self.keep_alive = False
        if status < 300:
            gateway.answered.add(route, self._request_id, client.name, backend.name)
        head = gateway.client_head(head, self._id_line, self._value_of(b"origin"), self.keep_alive)
        self._connection.write(head + data)
        if complete:
            self._end(answer.outcome)
        elif self._connection.write_paused:
            self.pause()

    def answer_goes_on(self, data: bytes, complete: bool) -> None:
        answer = self._answer
        if answer is None:
            return
        self._connection.write(data)
        answer.goes_on(data, self._gateway.loop.time())
        if complete:
            self._end(answer.outcome)

    def answer_broken(self, failure: Failure) -> None:
        """Before the answer has begun another backend may give it; afterwards none can."""
        backend, upstream, self._upstream = self._backend, self._upstream, None
        if backend is None or upstream is None:
            return
        if self._stage is RELAYING:
            backend.failed()
            self._fail(failure)
        elif upstream.used and upstream.silent:
            # The backend was closing an idle connection while we wrote to it: no fault of its own.
            self._connect_again(backend, "stale_connection", fresh=True)
        else:
            self._retry_or_fail(failure)

    # -- faults and the end ------------------------------------------------------------------

    def deadline(self, now: float) -> float:
        """When this request has taken too long, as of ``now``: seconds of the loop's clock."""
        stage, timeouts = self._stage, self._gateway.timeouts
        if stage is QUEUED:
            return self._began + timeouts.queue
        if stage is PIPELINED:
            return math.inf
        most = self._began + timeouts.total
        if stage is WAITING:
            return min(self._sent + timeouts.first_byte, most)
        if stage is RELAYING and self._answer is not None:
            # Silence counts from the latest byte, and not while the client holds the backend back.
            return min((now if self._paused else self._answer.last) + timeouts.stall, most)
        # The pool limits the time to connect.
        return most

    def check(self, now: float) -> None:
        if now < self.deadline(now):
            return
        stage = self._stage
        if stage is RECEIVING:
            self.keep_alive = False
            self._fail(self.refusal or failures.RECEIVE_TIMEOUT)
        elif stage is QUEUED:
            self._fail(failures.QUEUE_TIMEOUT.after(self._gateway.expected_wait))
        elif now >= self._began + self._gateway.timeouts.total:
            self._fail(failures.TOTAL_TIMEOUT)
        elif stage is WAITING:
            self._retry_or_fail(failures.FIRST_BYTE_TIMEOUT)
        else:
            self._fail(failures.STALL_TIMEOUT)

    def shut_down(self) -> None:
        self.keep_alive = False
        if self._stage is PIPELINED:
            # The answer to an earlier request goes out on the connection: no other may be sent.
            self._end(failures.SHUTTING_DOWN.code)
        else:
            self._fail(failures.SHUTTING_DOWN)

    def _retry(self, reason: str) -> bool:
        if self._backend is not None:
            self._backend.failed()
        backend = self._choose()
        if backend is not None:
            self._connect_again(backend, reason)
        return backend is not None

    def _connect_again(self, backend: Backend, reason: str, fresh: bool = False) -> None:
        self._gateway.totals.retries[reason] += 1
        self._stage = step(self._stage, RETRY)
        self._connect(backend, fresh)

    def _retry_or_fail(self, failure: Failure) -> None:
        """No answer has begun: try another backend, or tell the client."""
        if not self._retry(failure.code):
            self._fail(failure)

    def _fail(self, failure: Failure) -> None:
        """Tell the client of a failure: by an answer if none has begun, or by the stream's end."""
        shape, answer = self._target.route.errors, self._answer
        if answer is None:
            lines = self._gateway.cross_origin.lines(self._value_of(b"origin"))
            self._connection.write(failure.answer(self._request_id, lines, self.keep_alive, shape))
        else:
            self.keep_alive = False
            # A client that does not read would not see the event, and we would have to keep it.
            if answer.takes_event and not self._paused:
                self._connection.write(failure.last_chunks(shape))
            else:
                self._connection.abort()
        self._end(failure.code)

    def _end(self, outcome: str) -> None:
        """Free everything: the one place where it happens."""
        gateway, stage, client, answer = self._gateway, self._stage, self._client, self._answer
        self._stage = step(stage, END)
        self.response_complete = True
        gateway.deadlines.watched.discard(self)
        self._release()
        held = gateway.loop.time() - self._began
        if client is not None:
            # Without an answer of a backend nothing was used.
            client.settle(self._charge, 0 if answer is None else answer.end(held))
        gateway.totals.outcomes["unknown" if client is None else client.name, outcome] += 1
        self._trace.ended(outcome, None if answer is None else answer.tokens)
        if stage is QUEUED:
            gateway.admission.abandon(self)
        elif stage >= CONNECTING:
            gateway.admission.leave(held)
        self._connection.answered(self)
