"""The gate inside the engine core: proofs run only while chat has nothing to do.

The core runs one loop: take messages, step the scheduler, repeat. A proof call is a message
whose answer is a Future. The gate queues the call and runs it one part of a forward at a time from
the core's own idle callback, so nothing polls, and a chat request that arrives during a part waits
for that part at most. All methods run on the core's loop thread, except ``_chat_arrived``,
which only writes to a dictionary, and ``wake_if_needed``, which only posts a message.
"""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from proofserve.engines.vllm import core_messages
from proofserve.engines.vllm.core_port import CorePort
from proofserve.engines.vllm.core_times import CoreTimes, ShareBudget
from proofserve.engines.vllm.forwards import (
    WHOLE,
    Batch,
    ForwardSize,
    ForwardSizes,
    LeaseRefused,
    LeaseTable,
    run_batch,
)

# Seconds between two wakeups of the loop while calls wait or leases are held.
WAKEUP_S = 1.0
# Seconds without a chat step before a forward may start (ADR 9).
CHAT_GRACE_S = 0.006


@dataclass(frozen=True, slots=True)
class GateOptions:
    """The options that an operator sets.

    ``forward_batch``: nonces of one forward, None for as many as run within ``max_wait_s``, the
    longest that a chat request may wait for proofs. ``share``: the fraction of engine time that
    proofs may take while chat never pauses; 0 leaves all of it to chat. ``lease_idle_s``: after so
    many seconds without a call a lease goes back to the pool, because its API process is gone; a
    live session that merely paused takes a new lease with its next call.
    """

    forward_batch: int | None
    max_wait_s: float
    share: float
    lease_idle_s: float


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A call in the gate's queue and what its forwards have produced so far.

    Of a forward that has begun: its ``size``, the next ``layer``, and the seconds of its parts.
    """

    call: core_messages.ProveCall
    arrived: float
    size: ForwardSize | None = None
    layer: int = 0
    parts_s: list[float] = field(default_factory=list)
    future: "Future[dict[str, Any]]" = field(default_factory=Future)
    done: int = 0
    values: list[np.ndarray[Any, Any]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    @property
    def in_forward(self) -> Sequence[int]:
        """The nonces of the forward that has begun; none if it finds the size."""
        if self.size is None or not self.size.is_found:
            return ()
        return self.call.nonces[self.done : self.done + self.size.nonces]

    def answer(self, reply: dict[str, Any]) -> None:
        if not self.future.done():
            self.future.set_result(reply)

    def answer_with_rows(self) -> None:
        """Complete the call with the first ``done`` of its nonces, which may be all."""
        values = np.concatenate(self.values) if self.values else np.empty((0, 1), np.float32)
        self.answer(core_messages.proved(values, self.failed, self.done))


class ProofGate:
    """Queue, leases and times of one engine core. ``now``: the monotonic clock, in seconds."""

    def __init__(
        self, core: CorePort, options: GateOptions, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._core, self._options, self._now = core, options, now
        self._leases = LeaseTable(core)
        self._sizes = ForwardSizes(core, options.forward_batch, options.max_wait_s)
        self._times = CoreTimes(now, core.waited)
        self._budget = ShareBudget(options.share)
        self._queue: deque[QueuedCall] = deque()
        # A call that was answered in the middle of a forward; its next call goes on there.
        self._paused: QueuedCall | None = None
        self._awaits_idle = False
        if core.has_own_loop():
            core.watch(self._chat_arrived, self._chat_stepping, self._chat_stepped)

    # -- calls from the API process ----------------------------------------------------------

    def prove(self, call: core_messages.ProveCall) -> "Future[dict[str, Any]]":
        """Queue ``call``. The Future completes with a ``core_messages`` reply; it never raises.

        A call without nonces has the size of forwards measured anew, for a round that begins.
        """
        queued = QueuedCall(call, self._now())
        if not call.nonces:
            self._sizes.forget(call)
        if not self._core.has_own_loop():
            self._run_inline(queued)
        elif call.defer_s <= 0 and self._core.is_busy():
            queued.answer(self._deferral(queued))
        else:
            if not self._queue:
                self._budget.pause()
            self._queue.append(queued)
            self._await_idle()
        return queued.future

    def release(self, lease: str) -> None:
        for queued in [q for q in self._queue if q.call.lease == lease]:
            self._queue.remove(queued)
            queued.answer(core_messages.fault("the lease was returned before the call ran"))
        self._leases.release(lease)

    def take_over(self) -> None:
        """End all calls and leases: the API process that made them is gone, or about to end."""
        for queued in self._queue:
            queued.answer(core_messages.fault("another API process took the proofs over"))
        self._queue.clear()
        self._leases.release_all()

    def measure(self, call: core_messages.ProveCall, forwards: int) -> "Future[dict[str, Any]]":
        """Time ``forwards`` bare forwards back to back, once chat is idle; chat waits for all.

        The Future holds ``seconds`` and ``nonces``. The benchmark compares rounds with it; a node
        in service does not use it.
        """
        future: Future[dict[str, Any]] = Future()

        def run() -> None:
            try:
                first = QueuedCall(call, self._now())
                while not first.done:  # it finds the size and draws the block's tensors
                    self._run_part(first)
                lease = self._leases.get(call.lease, call, self._sizes.of(call).nonces, self._now())
                start = self._now()
                whole = [run_batch(self._core, lease, call, WHOLE) for _ in range(forwards)]
                nonces = sum(batch.count for batch in whole if batch is not None)
                future.set_result({"seconds": self._now() - start, "nonces": nonces})
            except Exception as error:  # noqa: BLE001 - an error here would kill the engine
                future.set_exception(error)
            finally:
                self._leases.release(call.lease)

        self._core.call_when_idle(run)
        return future

    @property
    def waiting_calls(self) -> int:
        """Calls in the queue, the running one included. Safe from another thread."""
        return len(self._queue)

    def gauges(self) -> dict[str, Any]:
        return {
            **self._times.read(),
            **self._sizes.read(),
            "leased_blocks": self._leases.held_blocks,
            "free_blocks": self._core.free_blocks(),
            "unfinished_requests": self._core.unfinished_requests(),
        }

    # -- the core's loop ---------------------------------------------------------------------

    def wake_up(self) -> "Future[None]":
        """Check deadlines and idle leases; the core's loop calls it for each posted wakeup."""
        now = self._now()
        for queued in [q for q in self._queue if now - q.arrived > q.call.defer_s]:
            self._answer_overdue(queued)
        in_use = {queued.call.lease for queued in self._queue}
        self._leases.release_unused(now - self._options.lease_idle_s, in_use)
        if self._queue:
            self._await_idle()
        return Future()  # never completed: no client waits for the answer

    def wake_if_needed(self) -> None:
        """Post a wakeup while calls wait or leases are held. Safe from another thread.

        During endless chat no other message may come, and the loop would not check deadlines.
        """
        if self._queue or len(self._leases):
            self._core.post_wakeup()

    def _answer_overdue(self, queued: QueuedCall) -> None:
        """Answer a call past its deadline: with what is finished, or that chat deferred it.

        Without chat a forward that has begun goes on at once, and would be lost to another call.
        """
        if not self._core.is_busy() and (queued.layer or not queued.done):
            return
        self._queue.remove(queued)
        if queued.layer:
            self._paused = queued
        if queued.done:
            queued.answer_with_rows()
        else:
            queued.answer(self._deferral(queued))

    def _await_idle(self) -> None:
        if not self._awaits_idle:
            self._awaits_idle = True
            self._core.call_when_idle(self._on_idle)

    def _on_idle(self) -> None:
        """The core has no work: run one forward, then let the core look at its messages."""
        self._awaits_idle = False
        if self._queue and self._chat_is_over():
            self._budget.pause()
            self._run_next_part()
        if self._queue:
            self._core.post_wakeup()

    def _chat_is_over(self) -> bool:
        """Wait for the grace to end or a message to come; return whether chat is over.

        Under steady chat the scheduler can run empty for a moment while the next requests are on
        their way through the API process. A forward in that moment would delay them all.
        """
        if (left := CHAT_GRACE_S - self._times.since_chat()) > 0:
            self._core.await_message(left)
        quiet = self._times.since_chat() >= CHAT_GRACE_S
        return quiet and not self._core.waiting_requests()

    def _chat_stepping(self) -> None:
        """Chat is about to step; a forward delays the step if proofs are not ahead of ``share``.

        It does not run at the end of the step before: the core's loop hands a step's tokens on
        only after that, and they would wait for the forward.
        """
        if self._queue and self._budget.is_open:
            began = self._now()
            self._run_next_part()
            ended = self._now()
            self._budget.spend(began, ended)
            self._core.delayed(began, ended)

    def _chat_stepped(self, start: float, end: float) -> None:
        self._times.stepped(start, end, deferring=bool(self._queue))
        if self._queue:
            self._budget.earn(start, end)
        else:
            self._budget.pause()

    def _run_next_part(self) -> None:
        """Run the next part of a call, and answer it when that was its last."""
        queued = self._next_call()
        try:
            if queued.call.nonces or not self._sizes.of(queued.call).is_found:
                self._run_part(queued)
            is_done = queued.done >= len(queued.call.nonces)
            is_done = is_done and self._sizes.of(queued.call).is_found
        except Exception as error:  # noqa: BLE001 - an error here would kill the engine
            self._queue.popleft()
            self._leases.release(queued.call.lease)
            queued.answer(core_messages.fault(f"{type(error).__name__}: {error}"))
            return
        if is_done:
            self._queue.popleft()
            queued.answer_with_rows()

    def _next_call(self) -> QueuedCall:
        """The oldest call, or one that goes on with the forward in which another was answered."""
        if (found := next(filter(self._goes_on, self._queue), None)) is not None:
            self._queue.remove(found)
            self._queue.appendleft(found)
        return self._queue[0]

    def _goes_on(self, queued: QueuedCall) -> bool:
        paused = self._paused
        if paused is None or paused.size is None or paused.call.lease != queued.call.lease:
            return False
        # A forward that finds the size proves none, so any call of the lease goes on with it.
        end = queued.done + paused.size.nonces if paused.size.is_found else queued.done
        return tuple(queued.call.nonces[queued.done : end]) == tuple(paused.in_forward)

    def _run_part(self, queued: QueuedCall) -> None:
        """Run the next part of a forward, which proves nonces, or padding if it finds the size.

        Raises LeaseRefused, or the error that a worker raised.
        """
        call = queued.call
        size = queued.size if queued.size and queued.layer else self._begin_forward(queued)
        try:
            lease = self._leases.get(call.lease, call, size.nonces, self._now())
        except LeaseRefused:
            if size.nonces == 1 or self._options.forward_batch:
                raise
            size.halve()
            return
        wanted = replace(call, nonces=call.nonces[queued.done :] if size.is_found else ())
        end = min(queued.layer + size.per_part, size.layers)
        with self._times.forward(self._core.waiting_requests):
            batch = run_batch(self._core, lease, wanted, (queued.layer, end, size.layers))
        queued.parts_s.append(self._times.last_forward_s)
        queued.layer = end % size.layers
        if batch is not None:
            self._end_forward(queued, size, batch)

    def _begin_forward(self, queued: QueuedCall) -> ForwardSize:
        """Begin a forward at its first layer, or go on with the one in which a call was answered.

        Otherwise a forward of more parts than chat leaves within a call's time would never end.
        """
        goes_on, paused, self._paused = self._goes_on(queued), self._paused, None
        size = queued.size = self._sizes.of(queued.call)
        if paused is not None and goes_on and paused.size is size:
            queued.layer, queued.parts_s = paused.layer, paused.parts_s
        elif not size.is_found:
            self._leases.release(queued.call.lease)
        return size

    def _end_forward(self, queued: QueuedCall, size: ForwardSize, batch: Batch) -> None:
        if size.is_found:
            size.ran(queued.parts_s)
            queued.values.append(batch.rows)
            queued.failed.extend(batch.failed)
            queued.done += batch.count
        else:
            size.measured(queued.parts_s)
            self._leases.release(queued.call.lease)
        queued.parts_s.clear()

    def _run_inline(self, queued: QueuedCall) -> None:
        """The core has no loop, its caller steps it: the call runs to its end, or is deferred."""
        if self._core.is_busy():
            queued.answer(self._deferral(queued))
            return
        self._queue.append(queued)
        while self._queue:
            self._run_next_part()

    def _deferral(self, queued: QueuedCall) -> dict[str, Any]:
        return core_messages.deferred("chat has the engine", self._now() - queued.arrived)

    def _chat_arrived(self, request_id: str) -> None:
        self._times.arrived(request_id, self._now())


def wake_until_orphaned(
    wake: Callable[[], None],
    parent_id: Callable[[], int] = os.getppid,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Call ``wake`` every ``WAKEUP_S`` seconds until the parent of this process has ended.

    An engine core whose API process was killed receives no more requests, but it would keep its
    memory, on a GPU the whole card, so that the next server could not start.
    """
    parent = parent_id()
    while parent_id() == parent:
        sleep(WAKEUP_S)
        wake()


def start_wakeups(wake: Callable[[], None]) -> None:
    """Call ``wake`` each second in a thread of its own; end this process once it is an orphan."""

    def run() -> None:
        wake_until_orphaned(wake)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=run, name="proofserve-wakeups", daemon=True).start()
