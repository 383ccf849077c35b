"""A round that generates: the engine's side and the outbox's side, until something ends them."""

import asyncio

from proofserve.rounds.counters import Counters
from proofserve.rounds.limits import RoundLimits
from proofserve.rounds.ports import Outbox, ProofEngine
from proofserve.rounds.prover import Prover
from proofserve.rounds.recorder import Recorder
from proofserve.rounds.records import RoundProgress, RoundSpec
from proofserve.rounds.tasks import end, reason_of


class Generation:
    """Generates the proofs of one round, once. Its ``counters`` may have counted before."""

    def __init__(
        self,
        engine: ProofEngine,
        outbox: Outbox,
        limits: RoundLimits,
        counters: Counters,
    ) -> None:
        self._engine = engine
        self._outbox = outbox
        self._limits = limits
        self._counters = counters
        self._recorder: Recorder | None = None
        self._prover: Prover | None = None
        self._stopping = asyncio.Event()
        self._closed = False
        self._errors: list[str] = []

    @property
    def paused_reason(self) -> str | None:
        """Why the round does not get on at the moment, None while it does."""
        sides = (self._recorder, self._prover)
        return next((side.trouble for side in sides if side is not None and side.trouble), None)

    @property
    def error(self) -> str | None:
        """What ended the round other than an order to stop, and what was lost by that."""
        return "; ".join(self._errors) or None

    def stop(self) -> None:
        """Let ``run`` end: calls in flight are cancelled, what is finished is stored."""
        self._stopping.set()

    async def run(self, spec: RoundSpec, opened: RoundProgress) -> None:
        """Generate until told to end or an error, which is kept in ``error`` and not raised.

        Every ending stores what was finished. The round stays open in the outbox until ``close``:
        a fault or a restart is not the end of it.
        """
        recorder = self._recorder = Recorder(
            self._outbox, spec.round_id, self._counters, self._limits
        )
        order = asyncio.create_task(self._stopping.wait())
        proving = asyncio.create_task(self._prove(spec, opened.next_index, recorder))
        recording = asyncio.create_task(recorder.run())
        sides = (proving, recording)
        try:
            await asyncio.wait({order, *sides}, return_when=asyncio.FIRST_COMPLETED)
            proving.cancel()
            await end(proving, grace_s=self._limits.flush_timeout_s)
            recorder.close()
            await end(recording, grace_s=self._limits.flush_timeout_s)
        finally:
            # On the way of an outer cancellation nothing may be awaited any more.
            for task in (order, *sides):
                task.cancel()
        self._errors.extend(text for text in map(reason_of, sides) if text)
        if lost := recorder.unstored_nonces:
            reason = recorder.trouble or "outbox: no answer"
            self._errors.append(f"{lost} finished nonces could not be stored ({reason})")

    async def close(self, spec: RoundSpec) -> None:
        """Close the round in the outbox, so that what was recorded is delivered at once.

        What prevents it is added to ``error``. Closing again does nothing.
        """
        if self._closed:
            return
        closing = asyncio.create_task(self._outbox.close_round(spec.round_id))
        await end(closing, grace_s=self._limits.flush_timeout_s)
        if closing.cancelled():
            self._errors.append("outbox: no answer when the round was closed")
        elif text := reason_of(closing):
            self._errors.append(text)
        else:
            self._closed = True

    async def _prove(self, spec: RoundSpec, first_index: int, recorder: Recorder) -> None:
        async with self._engine.session(spec.work) as session:
            prover = Prover(session, spec, first_index, self._counters, self._limits)
            self._prover = prover
            try:
                while True:
                    recorder.add(await prover.next())
                    await recorder.room()
            finally:
                await prover.aclose()
