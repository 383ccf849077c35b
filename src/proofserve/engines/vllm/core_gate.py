"""The gate inside the engine core: proofs run only while chat has nothing to do.

The core runs one loop: take messages, step the scheduler, repeat. A proof call is a message
whose answer is a Future. The gate queues the call and runs it one part of a forward at a time from
the core's own idle callback, so nothing polls, and a chat request that arrives during a part waits
for that part at most. All methods run on the core's loop thread, except ``_chat_arrived``,
which only writes to a dictionary, and ``wake_if_needed``, which only posts a message.
"""

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proofserve.engines.vllm import core_messages
from proofserve.engines.vllm.core_times import CoreTimes, ShareBudget
from proofserve.engines.vllm.forwards import (
    ForwardSize,
    ForwardSizes,
    Lease,
    LeaseRefused,
    LeaseTable,
    run_layers,
)

if TYPE_CHECKING:
    from proofserve.engines.vllm.compat_core import VllmCore

# Seconds between two wakeups of the loop while calls wait or leases are held.
WAKEUP_S = 1.0
# Seconds without a chat step before a forward may start (ADR 9).
CHAT_GRACE_S = 0.006


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A call in the gate's queue and what its forwards have produced so far."""

    call: core_messages.ProveCall
    arrived: float
    future: "Future[dict[str, Any]]" = field(default_factory=Future)
    done: int = 0
    values: list[NDArray[np.float32]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    def answer(self, reply: dict[str, Any]) -> None:
        if not self.future.done():
            self.future.set_result(reply)

    def answer_with_rows(self) -> None:
        """Complete the call with the first ``done`` of its nonces, which may be all."""
        values = np.concatenate(self.values) if self.values else np.empty((0, 1), np.float32)
        self.answer(core_messages.proved(values, self.failed, self.done))


@dataclass(slots=True)
class BegunForward:
    """A forward of ``nonces``, none if it finds the size; ``layer`` is the next one to run.

    ``parts_s``: how long its parts took, seconds.
    """

    lease: Lease
    nonces: Sequence[int]
    size: ForwardSize
    layer: int = 0
    parts_s: list[float] = field(default_factory=list)


class ProofGate:
    """Queue, leases and times of one engine core. ``now``: the monotonic clock, in seconds.

    ``forward_batch``: nonces of one forward, None for as many as run within ``max_wait_s``, the
    longest that a chat request may wait for proofs. ``share``: the fraction of engine time that
    proofs may take while chat never pauses; 0 leaves all of it to chat. ``lease_idle_s``: after so
    many seconds without a call a lease goes back to the pool, because its API process is gone; a
    live session that merely paused takes a new lease with its next call.
    """

    def __init__(
        self,
        core: "VllmCore",
        *,
        forward_batch: int | None,
        max_wait_s: float,
        share: float,
        lease_idle_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core, self._now = core, now
        self._forward_batch, self._lease_idle_s = forward_batch, lease_idle_s
        self._leases = LeaseTable(core)
        self._sizes = ForwardSizes(core, forward_batch, max_wait_s)
        self._times = CoreTimes(now, core.waited)
        self._budget = ShareBudget(share)
        self._queue: deque[QueuedCall] = deque()
        # Chat runs between its parts. If its call is answered meanwhile, the next one goes on here.
        self._begun: BegunForward | None = None
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
        self._leases.release_unused(math.inf, set())

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
                lease = self._leases.get(call, self._sizes.of(call).nonces, self._now())
                nonces = call.nonces[: lease.nonces]
                start = self._now()
                for _ in range(forwards):
                    run_layers(self._core, lease, call, nonces)
                seconds = self._now() - start
                future.set_result({"seconds": seconds, "nonces": forwards * len(nonces)})
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
        self._leases.release_unused(now - self._lease_idle_s, in_use)
        if self._queue:
            self._await_idle()
        return Future()  # never completed: no client waits for the answer

    def wake_if_needed(self) -> None:
        """Post a wakeup while calls wait or leases are held. Safe from another thread.

        During endless chat no other message may come, and the loop would not check deadlines.
        """
        if self._queue or self._leases.held:
            self._core.post_wakeup()

    def _answer_overdue(self, queued: QueuedCall) -> None:
        """Answer a call past its deadline: with what is finished, or that chat deferred it.

        Without chat a forward that has begun goes on at once, and would be lost to another call.
        """
        if not self._core.is_busy() and (self._begun_of(queued) or not queued.done):
            return
        self._queue.remove(queued)
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
        """Run the next part of a call, and answer it when that was its last.

        It is the call whose forward has begun, or the oldest.
        """
        queued = next(filter(self._begun_of, self._queue), self._queue[0])
        try:
            size = self._sizes.of(queued.call)
            if queued.call.nonces or not size.is_found:
                self._run_part(queued)
            is_done = queued.done >= len(queued.call.nonces) and size.is_found
        except Exception as error:  # noqa: BLE001 - an error here would kill the engine
            self._queue.remove(queued)
            self._leases.release(queued.call.lease)
            queued.answer(core_messages.fault(f"{type(error).__name__}: {error}"))
            return
        if is_done:
            self._queue.remove(queued)
            queued.answer_with_rows()

    def _begun_of(self, queued: QueuedCall) -> BegunForward | None:
        """The forward that has begun, if it is the next one of this call.

        One that finds the size proves no nonces, so it is one of any call of its lease.
        """
        begun = self._begun
        if begun is None or self._leases.held.get(queued.call.lease) is not begun.lease:
            return None
        end = queued.done + len(begun.nonces)
        is_next = tuple(queued.call.nonces[queued.done : end]) == tuple(begun.nonces)
        return begun if is_next else None

    def _run_part(self, queued: QueuedCall) -> None:
        """Run the next part of a forward, which proves nonces, or padding if it finds the size.

        Raises LeaseRefused, or the error that a worker raised.
        """
        begun = self._begun_of(queued) or self._begin_forward(queued)
        if begun is None:
            return
        call, size = queued.call, begun.size
        end = min(begun.layer + size.per_part, size.layers)
        layers = begun.layer, end, size.layers
        with self._times.forward(self._core.waiting_requests):
            proved = run_layers(self._core, begun.lease, call, begun.nonces, layers)
        begun.lease.last_used = self._now()
        begun.parts_s.append(self._times.last_forward_s)
        begun.layer = end
        if proved is None:
            return
        self._begun = None
        if size.is_found:
            size.ran(begun.parts_s)
            queued.values.append(proved[0])
            queued.failed.extend(proved[1])
            queued.done += len(begun.nonces)
        else:
            size.measured(begun.parts_s)
            self._leases.release(call.lease)

    def _begin_forward(self, queued: QueuedCall) -> BegunForward | None:
        """The next forward of a call; None if chat leaves KV blocks for a smaller one alone."""
        call, size = queued.call, self._sizes.of(queued.call)
        if not size.is_found:
            self._leases.release(call.lease)
        try:
            lease = self._leases.get(call, size.nonces, self._now())
        except LeaseRefused:
            if size.nonces == 1 or self._forward_batch:
                raise
            size.nonces //= 2
            return None
        nonces = call.nonces[queued.done :][: lease.nonces] if size.is_found else ()
        self._begun = BegunForward(lease, nonces, size)
        return self._begun

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
    """Call ``wake`` every ``WAKEUP_S`` seconds until the parent of this process has ended."""
    parent = parent_id()
    while parent_id() == parent:
        sleep(WAKEUP_S)
        wake()


def start_wakeups(wake: Callable[[], None]) -> None:
    """Call ``wake`` each second in a thread of its own; end this process once it is an orphan.

    An engine core whose API process was killed receives no more requests, but it would keep its
    memory, on a GPU the whole card, so that the next server could not start.
    """

    def run() -> None:
        wake_until_orphaned(wake)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=run, name="proofserve-wakeups", daemon=True).start()
