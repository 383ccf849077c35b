"""The API process's side: vLLM's engine client as a ``rounds.ports.ProofEngine``."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from proofserve.engines.vllm import compat, wire
from proofserve.rounds.errors import EngineFault, EngineGone
from proofserve.rounds.records import Deferred, EngineFacts, EngineGauges, ProofBatch, Workload

PROVE = "proofserve_prove"
RELEASE = "proofserve_release"
GAUGES = "proofserve_gauges"
MEASURE = "proofserve_measure"


class VllmEngine:
    """A vLLM async engine, served or embedded in the caller's own process.

    ``defer_s``: how long, in seconds, a call may wait for chat inside the engine before it is
    answered ``Deferred``.
    """

    def __init__(self, engine_client: Any, facts: EngineFacts, defer_s: float) -> None:
        self._client = engine_client
        self._facts = facts
        self._defer_s = defer_s

    @property
    def facts(self) -> EngineFacts:
        """What is deployed."""
        return self._facts

    def session(self, work: Workload) -> AbstractAsyncContextManager["VllmSession"]:
        """A lease; it is taken by the first call and returned at the context's end."""
        return self._session(work)

    @asynccontextmanager
    async def _session(self, work: Workload) -> AsyncIterator["VllmSession"]:
        session = VllmSession(self, work)
        try:
            yield session
        finally:
            # Shielded: a cancelled round must still give its blocks back.
            await asyncio.shield(session.release())

    async def gauges(self) -> EngineGauges:
        """Read the counters inside the engine. Raises EngineGone."""
        read = await self.call(GAUGES)
        return EngineGauges(**{**read, "resume_ms": tuple(read["resume_ms"])})

    async def measure(self, work: Workload, nonces: Sequence[int], forwards: int) -> float:
        """Nonces per second of bare forwards back to back, without HTTP, rounds or outbox."""
        call = call_for(work, uuid.uuid4().hex, nonces, self._defer_s)
        read = await self.call(MEASURE, call.pack(), forwards)
        return float(read["nonces"] / read["seconds"])

    async def call(self, method: str, *args: Any) -> Any:
        """An EngineCore method. Raises EngineGone, or EngineFault with the engine's own text."""
        try:
            return await compat.call_engine(self._client, method, *args)
        except Exception as error:
            if compat.is_engine_dead(error):
                raise EngineGone("the engine process has died; restart the server") from error
            raise EngineFault(str(error)) from error

    @property
    def defer_s(self) -> float:
        """Bound of a deferral inside the engine, seconds."""
        return self._defer_s


class VllmSession:
    """A lease of ``VllmEngine`` for one workload."""

    def __init__(self, engine: VllmEngine, work: Workload) -> None:
        self._engine = engine
        self._work = work
        self._lease = uuid.uuid4().hex

    async def prove(self, nonces: Sequence[int]) -> ProofBatch | Deferred:
        """See ``rounds.ports.ProofSession.prove``."""
        call = call_for(self._work, self._lease, nonces, self._engine.defer_s)
        return read_reply(call, await self._engine.call(PROVE, call.pack()))

    async def release(self) -> None:
        """Return the lease. A dead engine has nothing to return."""
        try:
            await self._engine.call(RELEASE, self._lease)
        except EngineGone:
            return


def call_for(work: Workload, lease: str, nonces: Sequence[int], defer_s: float) -> wire.ProveCall:
    """The wire form of one ``prove``."""
    return wire.ProveCall(
        lease=lease,
        scheme=work.scheme.to_wire(),
        block_hash=work.block_hash,
        public_key=work.public_key,
        seq_len=work.seq_len,
        nonces=tuple(nonces),
        defer_s=defer_s,
    )


def read_reply(call: wire.ProveCall, reply: dict[str, Any]) -> ProofBatch | Deferred:
    """The record of a reply. Raises EngineFault for a fault and for a lease that was returned."""
    if reply["kind"] == wire.PROVED:
        failed = tuple(reply["failed"])
        nonces = tuple(nonce for nonce in call.nonces if nonce not in set(failed))
        return ProofBatch(nonces, wire.values_of(reply), failed)
    if reply["kind"] == wire.DEFERRED:
        return Deferred(reply["reason"], reply["seconds"])
    if reply["kind"] == wire.RELEASED:
        raise EngineFault("the lease was returned before the call ran")
    raise EngineFault(reply["error"])
