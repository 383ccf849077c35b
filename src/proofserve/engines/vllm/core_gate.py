"""The gate inside the engine core: proofs pass only while chat has nothing to do.

The core runs one loop: take messages, step the scheduler, repeat. A proof call is a message
whose answer is a Future. The gate queues it and runs it one forward at a time from the core's
own idle callback, so nothing polls, and a chat request that arrives during a forward waits for
that forward at most. All methods run on the core's loop thread except ``_chat_arrived`` and the
body of the alarm, which only append to a dictionary and post a message.
"""

import os
import signal
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from proofserve.engines.vllm import compat, wire
from proofserve.engines.vllm.batch import BatchRunner
from proofserve.engines.vllm.lease import LeaseBook
from proofserve.engines.vllm.ledger import Ledger

# How often the loop is woken to look at deadlines, seconds.
ALARM_S = 1.0
# How long chat must have been quiet before a forward takes the engine, seconds.
CHAT_GRACE_S = 0.006
# The EngineCore method under which the plugin installs ``ProofGate.turn``.
TURN = "proofserve_turn"


@dataclass(slots=True)
class Pending:
    """A call in the gate's queue and what its forwards have produced so far."""

    call: wire.ProveCall
    arrived: float
    future: "Future[dict[str, Any]]" = field(default_factory=Future)
    done: int = 0
    values: list[np.ndarray[Any, Any]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    def answer(self, reply: dict[str, Any]) -> None:
        """Complete the call, unless it already is."""
        if not self.future.done():
            self.future.set_result(reply)

    def answer_with_rows(self) -> None:
        """Complete the call with the first ``done`` of its nonces, which may be all."""
        self.answer(wire.proved(np.concatenate(self.values), self.failed, self.done))


class ProofGate:
    """Queue, leases and ledger of one engine core.

    ``forward_batch``: sequences of one forward. ``share``: the fraction of engine time that
    proofs may take while chat never pauses; 0 leaves all of it to chat. ``lease_idle_s``: a lease
    that nobody uses for so many seconds goes back to the pool, because its API process is gone; a
    live one that merely paused takes a new lease with its next call.
    """

    def __init__(self, engine: Any, forward_batch: int, share: float, lease_idle_s: float) -> None:
        self._engine = engine
        self._lease_idle_s = lease_idle_s
        self._leases = LeaseBook(engine, forward_batch)
        self._batches = BatchRunner(engine, self._leases)
        self._ledger = Ledger()
        self._share = share
        self._queue: deque[Pending] = deque()
        self._armed = False
        if compat.has_own_loop(engine):
            compat.watch_arrivals(engine, self._chat_arrived)
            compat.watch_steps(engine, self._stepped)
            self._parent = os.getppid()
            threading.Thread(target=self._ring, name="proofserve-alarm", daemon=True).start()

    # -- calls from the API process ----------------------------------------------------------

    def prove(self, call: wire.ProveCall) -> "Future[dict[str, Any]]":
        """Queue ``call``. The Future completes with a reply of ``wire``; it never raises."""
        pending = Pending(call, time.monotonic())
        if not compat.has_own_loop(self._engine):
            self._run_inline(pending)
        elif call.defer_s <= 0 and compat.is_busy(self._engine):
            pending.answer(self._deferral(pending))
        else:
            self._queue.append(pending)
            self._arm()
        return pending.future

    def release(self, lease: str) -> None:
        """Return a lease; calls of it that have not finished never will."""
        for pending in [p for p in self._queue if p.call.lease == lease]:
            self._queue.remove(pending)
            pending.answer(wire.released())
        self._leases.release(lease)

    def measure(self, call: wire.ProveCall, forwards: int) -> "Future[dict[str, Any]]":
        """Time ``forwards`` bare forwards back to back, once chat is idle; chat waits for all.

        The Future holds ``seconds`` and ``nonces``. It is the yardstick of the benchmark, and not
        for a node in service.
        """
        future: Future[dict[str, Any]] = Future()

        def run(_engine: Any) -> None:
            try:
                self._batches.run(call, 0)  # the first one draws what its block needs
                start = time.monotonic()
                nonces = sum(self._batches.run(call, 0).count for _ in range(forwards))
                future.set_result({"seconds": time.monotonic() - start, "nonces": nonces})
            except Exception as error:  # noqa: BLE001 - an error here would kill the engine
                future.set_exception(error)
            finally:
                self._leases.release(call.lease)

        compat.call_when_idle(self._engine, run)
        return future

    def gauges(self) -> dict[str, Any]:
        """Counters of the ledger and of the block pool."""
        return {
            **self._ledger.read(),
            "leased_blocks": self._leases.held_blocks,
            "free_blocks": compat.free_blocks(self._engine),
            "unfinished_requests": compat.unfinished_requests(self._engine),
        }

    def turn(self) -> "Future[None]":
        """Look after deadlines and take up waiting work; called by the core's loop."""
        now = time.monotonic()
        for pending in [p for p in self._queue if now - p.arrived > p.call.defer_s]:
            self._overdue(pending)
        self._leases.release_unused(now - self._lease_idle_s, {p.call.lease for p in self._queue})
        if self._queue:
            self._arm()
        return Future()  # never completed: nobody asked

    def _overdue(self, pending: Pending) -> None:
        """Answer a call that takes long: with what is done, or that chat holds it back."""
        if pending.done > 0:
            self._queue.remove(pending)
            pending.answer_with_rows()
        elif compat.is_busy(self._engine):
            self._queue.remove(pending)
            pending.answer(self._deferral(pending))

    # -- the core's loop ---------------------------------------------------------------------

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            compat.call_when_idle(self._engine, self._on_idle)

    def _on_idle(self, _engine: Any) -> None:
        """The core ran out of work: one forward, then let it look at its queue again."""
        self._armed = False
        self._ledger.idle()
        if self._queue and self._chat_is_over():
            self._advance()
        if self._queue:
            compat.post_turn(self._engine, TURN)

    def _chat_is_over(self) -> bool:
        """Whether chat has been quiet for the grace; it is waited for, unless a message comes.

        Under steady chat the scheduler can run empty for a moment while the next requests are on
        their way through the API process. A forward that slips in there costs them all its length.
        """
        if (left := CHAT_GRACE_S - self._ledger.since_chat()) > 0:
            compat.await_message(self._engine, left)
        quiet = self._ledger.since_chat() >= CHAT_GRACE_S
        return quiet and not compat.waiting_requests(self._engine)

    def _stepped(self, start: float, end: float) -> None:
        """Chat had a step. Under ``share`` a forward may follow it, chat waiting or not."""
        self._ledger.stepped(start, end, deferring=bool(self._queue))
        if self._share > 0 and self._queue and self._ledger.proof_share() < self._share:
            self._advance()

    def _advance(self) -> None:
        """Run the next forward of the oldest call, and answer it when that was its last."""
        pending = self._queue[0]
        try:
            with self._ledger.forward(self._waiting):
                batch = self._batches.run(pending.call, pending.done)
        except Exception as error:  # noqa: BLE001 - an error here would kill the engine
            self._queue.popleft()
            self._leases.release(pending.call.lease)
            pending.answer(wire.fault(f"{type(error).__name__}: {error}"))
            return
        pending.values.append(batch.rows)
        pending.failed.extend(batch.failed)
        pending.done += batch.count
        if pending.done >= len(pending.call.nonces):
            self._queue.popleft()
            pending.answer_with_rows()

    def _run_inline(self, pending: Pending) -> None:
        """A core without a loop of its own: its caller steps it, so there is no idle to await."""
        if compat.is_busy(self._engine):
            pending.answer(self._deferral(pending))
            return
        self._queue.append(pending)
        while self._queue:
            self._advance()

    def _waiting(self) -> list[str]:
        return compat.waiting_requests(self._engine) if compat.has_own_loop(self._engine) else []

    def _deferral(self, pending: Pending) -> dict[str, Any]:
        return wire.deferred("chat has the engine", time.monotonic() - pending.arrived)

    # -- other threads -----------------------------------------------------------------------

    def _chat_arrived(self, request_id: str) -> None:
        self._ledger.arrived(request_id, time.monotonic())

    def _ring(self) -> None:
        """Wake the loop now and then: under endless chat no message may come to do it."""
        while os.getppid() == self._parent:
            time.sleep(ALARM_S)
            if self._queue or len(self._leases):
                compat.post_turn(self._engine, TURN)
        # The API process was killed. Nobody can reach this core any more, but it would hold its
        # memory, and on a GPU the whole card, against the server that is started next.
        os.kill(os.getpid(), signal.SIGTERM)
