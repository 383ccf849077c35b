"""One request and its answer. Whoever ends first, everything is freed in one place (ADR 11).

An exchange owns its client's charge, its permit, its place at a backend and the connection to it.
All its methods are callbacks of one event loop; none of them waits.
"""

import math
from collections.abc import Sequence

from proofserve.gateway import failures
from proofserve.gateway.backends.fleet import Backend
from proofserve.gateway.backends.upstream import Upstream
from proofserve.gateway.failures import Failure
from proofserve.gateway.limits.admission import Entry
from proofserve.gateway.limits.clients import NOTHING, Client, total
from proofserve.gateway.limits.request_body import RequestFields
from proofserve.gateway.relay.backend_response import BackendResponse
from proofserve.gateway.relay.connection import Connection
from proofserve.gateway.relay.gateway import Gateway
from proofserve.gateway.relay.headers import Header, request_head, response_head
from proofserve.gateway.relay.stages import CONNECTING, ENDED, QUEUED, RECEIVING, RELAYING, WAITING

# Backends that one request may try.
ATTEMPTS = 3
# Bytes of a conversation that decide where its prefix is cached.
PREFIX_BYTES = 1024


class Exchange:
    """One request of a client."""

    # What most exchanges never change is told once, for all of them.
    _body: bytes | bytearray = b""
    _stage = RECEIVING
    # Whether the client has its answer.
    response_complete = False
    # It will be answered with this, whatever its body says.
    refusal: Failure | None = None
    _client: Client | None = None
    _charge = NOTHING
    _order = RequestFields()
    _prefix = b""
    _permit = False
    _backend: Backend | None = None
    _tried: frozenset[Backend] = frozenset()
    _upstream: Upstream | None = None
    _answer: BackendResponse | None = None
    _paused = False

    def __init__(
        self,
        gateway: Gateway,
        connection: Connection,
        target: bytes,
        headers: Sequence[Header],
        keep_alive: bool,
    ) -> None:
        self.keep_alive = keep_alive and not gateway.draining
        self._gateway = gateway
        self._connection = connection
        self._target = target
        self._headers = headers
        self._value_of = value_of = dict(headers).get
        self._began = gateway.loop.time()
        self._deadline = self._began + gateway.plan.timeouts.total
        self._request_id = gateway.ids.of(value_of(b"x-request-id"))
        self._id_line = b"x-request-id: %s\r\n" % self._request_id
        if int(value_of(b"content-length", b"0")) > gateway.plan.max_body_bytes:
            self.refusal = failures.BODY_TOO_LARGE
        gateway.watch.add(self)

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for a word before it sends the body."""
        return self._value_of(b"expect", b"").lower() == b"100-continue"

    # -- the client's side -------------------------------------------------------------------

    def refuse(self, failure: Failure) -> None:
        """Answer with ``failure`` once the body has come; none of it is kept."""
        self.refusal = failure
        self._body = b""

    def body_received(self, data: bytes) -> None:
        """A part of the body."""
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
        """Another request of the connection comes first: no deadline yet."""
        self._deadline = math.inf

    def turn(self) -> None:
        """Now it comes first."""
        gateway = self._gateway
        self._deadline = gateway.loop.time() + gateway.plan.timeouts.total

    def start(self) -> None:
        """The body is complete, and it is this request's turn on its connection."""
        failure = self.refusal or self._admit()
        if failure is not None:
            self._fail(failure)

    def client_gone(self) -> None:
        """Nobody wants the answer any more."""
        if self._stage is not ENDED:
            self._end("client_left")

    def pause(self) -> None:
        """The client takes less than it was given."""
        self._paused = True
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        """The client has caught up."""
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
        client = gateway.clients.find(self._value_of(b"authorization", b""))
        if client is None:
            return failures.UNAUTHORIZED
        try:
            self._order = order = gateway.orders.read(self._body)
        except ValueError as error:
            return failures.INVALID_BODY.saying(str(error))
        if not gateway.fleet.knows(order.model):
            return failures.UNKNOWN_MODEL.saying(
                f"No backend serves the model {order.model!r:.200}."
            )
        charge = client.admit(order, len(self._body))
        if isinstance(charge, Failure):
            return charge
        self._client, self._charge = client, charge
        return self._enter()

    def _enter(self) -> Failure | None:
        gateway = self._gateway
        self._began = gateway.loop.time()
        entry = gateway.admission.enter(self)
        if entry is Entry.GRANTED:
            self.permit_granted()
        elif entry is Entry.QUEUED:
            self._stage = QUEUED
            self._deadline = self._began + gateway.plan.timeouts.queue
        else:
            return failures.QUEUE_FULL.after(self._expected_wait())
        return None

    def _expected_wait(self) -> float:
        gateway = self._gateway
        return min(gateway.admission.expected_wait, gateway.plan.timeouts.queue)

    def permit_granted(self) -> None:
        """The request may go to a backend."""
        gateway = self._gateway
        now = gateway.loop.time()
        gateway.tally.wait.observe(now - self._began)
        self._permit = True
        self._stage = CONNECTING
        self._began = now
        self._deadline = now + gateway.plan.timeouts.total
        if gateway.plan.affinity:
            self._prefix = self._order.beginning(PREFIX_BYTES)
        backend = gateway.fleet.choose(self._order.model, self._prefix, ())
        if backend is None:
            self._fail(failures.NO_BACKEND)
        else:
            self._go_to(backend)

    # -- the backend's side ------------------------------------------------------------------

    def _go_to(self, backend: Backend, fresh: bool = False) -> None:
        self._stage = CONNECTING
        self._backend = backend
        backend.chosen()
        backend.pool.acquire(self, fresh)

    def connected(self, upstream: Upstream) -> None:
        """Send the request, if anybody still wants its answer."""
        if self._stage is not CONNECTING or self._backend is None:
            upstream.spare()
            return
        gateway = self._gateway
        self._upstream = upstream
        self._stage = WAITING
        first_byte = gateway.loop.time() + gateway.plan.timeouts.first_byte
        self._deadline = min(first_byte, self._began + gateway.plan.timeouts.total)
        host, body = self._backend.pool.host, self._body
        own = self._id_line + gateway.backend_lines
        head = request_head(self._target, host, self._headers, gateway.held_back, len(body), own)
        upstream.send(self, head, body)

    def connect_failed(self, failure: Failure) -> None:
        """Try another backend."""
        if self._stage is CONNECTING:
            self._fail_over(failure)

    def answer_begins(self, status: int, head: bytes, data: bytes, complete: bool) -> None:
        """Pass the head on, unless another backend may do better."""
        gateway, backend, upstream = self._gateway, self._backend, self._upstream
        if backend is None or upstream is None:
            return
        if status < 500:
            backend.worked()
        else:
            backend.failed()
            if self._moved_on("backend_error"):
                return
        self._stage = RELAYING
        now = gateway.loop.time()
        timeouts = gateway.plan.timeouts
        self._deadline = min(now + timeouts.stall, self._began + timeouts.total)
        series = gateway.tally.series[backend.name, backend.label(self._order.model)]
        series.first.observe(now - self._began)
        self._answer = answer = BackendResponse(status, head, data, series, now)
        if upstream.until_close:
            self.keep_alive = False
        own = self._id_line
        if gateway.cross_origin.configured:
            head = gateway.cross_origin.strip(head)
            own += gateway.cross_origin.lines(self._value_of(b"origin"))
        self._connection.write(response_head(head, own, self.keep_alive) + data)
        if complete:
            self._end(answer.outcome)
        elif self._connection.write_paused:
            self.pause()

    def answer_goes_on(self, data: bytes, complete: bool) -> None:
        """Pass more of the body on, as it came."""
        answer = self._answer
        if answer is None:
            return
        self._connection.write(data)
        answer.goes_on(data, self._gateway.loop.time())
        if complete:
            self._end(answer.outcome)

    def answer_broken(self, failure: Failure) -> None:
        """Before the answer has begun somebody else may give it; afterwards nobody can."""
        upstream, self._upstream = self._upstream, None
        if self._stage is RELAYING:
            if self._backend is not None:
                self._backend.failed()
            self._break_off(failure)
        elif upstream is not None and upstream.used and upstream.silent and self._backend:
            # The backend closed an idle connection while we were writing to it. No fault of its.
            backend = self._leave_backend()
            self._gateway.tally.retries["stale_connection"] += 1
            self._go_to(backend, fresh=True)
        else:
            self._fail_over(failure)

    # -- faults ------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Give up what has taken too long."""
        if now < self._deadline:
            return
        timeouts = self._gateway.plan.timeouts
        stage = self._stage
        if stage is RECEIVING:
            self.keep_alive = False
            self._fail(self.refusal or failures.RECEIVE_TIMEOUT)
        elif stage is QUEUED:
            self._fail(failures.QUEUE_TIMEOUT.after(self._expected_wait()))
        elif now >= self._began + timeouts.total:
            self._too_late(failures.TOTAL_TIMEOUT)
        elif stage is WAITING:
            self._fail_over(failures.FIRST_BYTE_TIMEOUT)
        elif self._answer is not None:
            silent_since = now if self._paused else self._answer.last
            if now >= silent_since + timeouts.stall:
                self._too_late(failures.STALL_TIMEOUT)
            else:
                self._deadline = min(silent_since + timeouts.stall, self._began + timeouts.total)
        else:
            # The pool looks after the time to connect.
            self._deadline = self._began + timeouts.total

    def shut_down(self) -> None:
        """The time for finishing is over."""
        self.keep_alive = False
        if self._deadline == math.inf:
            # On its connection another answer comes first: there is no place for its own.
            self._end(failures.SHUTTING_DOWN.code)
        else:
            self._too_late(failures.SHUTTING_DOWN)

    def _too_late(self, failure: Failure) -> None:
        if self._stage is RELAYING:
            self._break_off(failure)
        else:
            self._fail(failure)

    def _fail_over(self, failure: Failure) -> None:
        if self._backend is not None:
            self._backend.failed()
        if not self._moved_on(failure.code):
            self._fail(failure)

    def _moved_on(self, reason: str) -> bool:
        """Go to another backend if one may take it."""
        if self._backend is None or len(self._tried) + 1 >= ATTEMPTS:
            return False
        tried = self._tried | {self._backend}
        other = self._gateway.fleet.choose(self._order.model, self._prefix, tried)
        if other is None:
            return False
        self._tried = tried
        self._leave_backend()
        self._gateway.tally.retries[reason] += 1
        self._go_to(other)
        return True

    def _fail(self, failure: Failure) -> None:
        """Answer with a failure: nothing of an answer was sent yet."""
        lines = self._gateway.cross_origin.lines(self._value_of(b"origin"))
        self._connection.write(failure.answer(self._request_id, lines, self.keep_alive))
        self._end(failure.code)

    def _break_off(self, failure: Failure) -> None:
        """Tell the client in mid-stream if there is a place for it; cut the answer off if not."""
        self.keep_alive = False
        # To one that does not read nothing can be told, and nothing more is kept for it.
        if self._answer is not None and self._answer.takes_event and not self._paused:
            self._connection.write(failure.last_chunks())
        else:
            self._connection.abort()
        self._end(failure.code)

    # -- the end -----------------------------------------------------------------------------

    def _leave_backend(self) -> Backend:
        backend, upstream = self._backend, self._upstream
        self._backend = self._upstream = None
        if upstream is not None:
            upstream.release()
        if backend is None:
            raise RuntimeError("left a backend twice")
        backend.released()
        return backend

    def _end(self, outcome: str) -> None:
        """Free everything: the one place where it happens."""
        gateway, stage = self._gateway, self._stage
        self._stage = ENDED
        self.response_complete = True
        gateway.watch.discard(self)
        if stage is QUEUED:
            gateway.admission.abandon(self)
        if self._backend is not None:
            self._leave_backend()
        name = "unknown"
        if self._client is not None:
            name = self._client.name
            self._settle(self._client)
        gateway.tally.outcomes[name, outcome] += 1
        if self._permit:
            gateway.admission.leave(gateway.loop.time() - self._began)
        self._connection.answered(self)

    def _settle(self, client: Client) -> None:
        if self._answer is None:
            # No backend has begun to answer: nothing was used.
            client.settle(self._charge, 0)
            return
        usage = self._answer.end(self._gateway.loop.time() - self._began)
        client.settle(self._charge, None if usage is None else total(usage))
