"""One round: the engine's side and the outbox's side, joined until something ends them."""

import asyncio
from collections.abc import Callable

from proofserve.rounds.counters import Counters
from proofserve.rounds.limits import RoundLimits
from proofserve.rounds.ports import Outbox, ProofEngine
from proofserve.rounds.prover import Prover
from proofserve.rounds.recorder import Recorder
from proofserve.rounds.records import RoundSpec, Stats
from proofserve.rounds.tasks import end, reason_of


class Generation:
    """Generates the proofs of ``spec``. ``clock`` gives monotonic seconds, for the counters."""

    def __init__(
        self,
        engine: ProofEngine,
        outbox: Outbox,
        spec: RoundSpec,
        limits: RoundLimits,
        clock: Callable[[], float],
    ) -> None:
        self.spec = spec
        self._engine = engine
        self._outbox = outbox
        self._limits = limits
        self._counters = Counters(clock)
        self._recorder = Recorder(outbox, spec.round_id, self._counters, limits)
        self._prover: Prover | None = None
        self._stopping = asyncio.Event()
        self._errors: list[str] = []

    @property
    def stats(self) -> Stats:
        """The counters now, or at the round's end."""
        return self._counters.read()

    @property
    def paused_reason(self) -> str | None:
        """Why the round does not get on at the moment, None while it does."""
        return self._recorder.trouble or (self._prover.trouble if self._prover else None)

    @property
    def error(self) -> str | None:
        """What ended the round other than an order to stop, and what was lost by that."""
        return "; ".join(self._errors) or None

    def stop(self) -> None:
        """Let ``run`` end: calls in flight are cancelled, what is finished is stored."""
        self._stopping.set()

    async def run(self) -> None:
        """Generate until ``stop`` or an error, which is kept in ``error`` and not raised.

        Every ending stores what was finished and closes the round in the outbox, so that what was
        recorded is delivered.
        """
        order = asyncio.create_task(self._stopping.wait())
        proving = asyncio.create_task(self._prove())
        recording = asyncio.create_task(self._recorder.run())
        sides = (proving, recording)
        try:
            await asyncio.wait({order, *sides}, return_when=asyncio.FIRST_COMPLETED)
            proving.cancel()
            await end(proving, grace_s=self._limits.flush_timeout_s)
            self._recorder.close()
            await end(recording, grace_s=self._limits.flush_timeout_s)
        finally:
            # On the way of an outer cancellation nothing may be awaited any more.
            for task in (order, *sides):
                task.cancel()
        self._errors.extend(text for text in map(reason_of, sides) if text)
        await self._close()

    async def _prove(self) -> None:
        async with self._engine.session(self.spec.work) as session:
            self._prover = Prover(session, self.spec, self._counters, self._limits)
            try:
                while True:
                    self._recorder.add(await self._prover.next())
                    await self._recorder.room()
            finally:
                await self._prover.aclose()

    async def _close(self) -> None:
        """The round's last words: to the outbox, and about what the outbox did not take."""
        self._counters.end()
        if lost := self._recorder.unstored_nonces:
            reason = self._recorder.trouble or "outbox: no answer"
            self._errors.append(f"{lost} finished nonces could not be stored ({reason})")
        closing = asyncio.create_task(self._outbox.close_round(self.spec.round_id))
        await end(closing, grace_s=self._limits.flush_timeout_s)
        if closing.cancelled():
            self._errors.append("outbox: no answer when the round was closed")
        elif text := reason_of(closing):
            self._errors.append(text)
