"""What an engine computes: checked batches, a job's nonces, verdicts about claims, a self-check."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from proofserve.protocol import DEFAULT_SCHEME
from proofserve.protocol.codec import encode, to_float16
from proofserve.protocol.errors import IncompleteRecomputation
from proofserve.protocol.identity import Block
from proofserve.protocol.network_schemes import is_winner
from proofserve.protocol.schemes import scheme
from proofserve.protocol.verdict.comparison import Claim, compare, compare_distances
from proofserve.protocol.verdict.counting import judge, judge_distances
from proofserve.rounds.errors import EngineFault, Refusal, Refused
from proofserve.rounds.ports import ProofEngine, Prove
from proofserve.rounds.records import (
    Deferred,
    DistanceClaims,
    DistanceVerdict,
    Finding,
    Job,
    Outcome,
    ProofBatch,
    Proofs,
    RoundSpec,
    StatTest,
    Target,
    Verdict,
    Winner,
    Workload,
)
from proofserve.rounds.status import NodeTotals, Purpose, QueueGauges

NOT_FINITE = "the model's output for this nonce was not finite"

# An engine waits for chat before it answers "deferred", so callers ask again at once. This pause
# prevents a busy loop with an engine that answers without waiting.
SHORTEST_DEFERRAL_S = 0.05

# Fixed inputs of the self-check, so that its result depends only on the node.
NONCES = (0,)
BLOCK, KEY = Block("proofserve self-check", 0), "proofserve"
# Tokens: one KV block for each sequence on most engines, so that even a nearly full pool has room.
SEQ_LEN = 16


def chunks(nonces: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(nonces[start : start + size]) for start in range(0, len(nonces), size)]


async def ask(prove: Prove, nonces: Sequence[int], width: int) -> ProofBatch | Deferred:
    """The checked batch of ``nonces``, or ``Deferred`` after at least 50 ms.

    Raises EngineFault (the computation failed, or its answer cannot be used) and EngineGone.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    answer = await prove(nonces)
    if isinstance(answer, Deferred):
        await asyncio.sleep(max(0.0, began + SHORTEST_DEFERRAL_S - loop.time()))
        return answer
    return checked(answer, nonces, width)


def checked(batch: ProofBatch, nonces: Sequence[int], width: int) -> ProofBatch:
    """Return ``batch`` if it has finite rows for all ``nonces``. Raises EngineFault otherwise."""
    failed = frozenset(batch.failed)
    expected = tuple(nonce for nonce in nonces if nonce not in failed)
    if batch.nonces != expected or not failed <= frozenset(nonces):
        raise EngineFault("the engine answered for other nonces than it was asked for")
    if batch.values.shape != (len(expected), width):
        raise EngineFault(
            f"the engine answered with shape {batch.values.shape}"
            f" where {(len(expected), width)} is needed"
        )
    # Checked in the published type: a finite float32 can be infinite in float16.
    if not np.isfinite(to_float16(batch.values)).all():
        raise EngineFault("the engine answered with values that are not finite")
    return batch


def findings_of(batch: ProofBatch, target: Target | None) -> tuple[Finding, ...]:
    """What a round publishes: every artifact, or the winners by ``target`` (A.2.8)."""
    if target is None:
        return artifacts_of(batch)
    return tuple(
        Winner(nonce, distance)
        for nonce, distance in zip(batch.nonces, distances_of(batch), strict=True)
        if is_winner(distance, target.r_target)
    )


def distances_of(batch: ProofBatch) -> tuple[float, ...]:
    """The one value of every row of a distance batch, widened to a Python float."""
    return tuple(batch.values[:, 0].tolist())


def artifacts_of(batch: ProofBatch) -> tuple[Claim, ...]:
    texts = encode(batch.values)
    return tuple(Claim(n, text) for n, text in zip(batch.nonces, texts, strict=True))


@dataclass(slots=True, eq=False)
class NonceLimit:
    """Counts the nonces that wait for the engine."""

    _limit: int
    _queued: int = 0

    @property
    def gauges(self) -> QueueGauges:
        return QueueGauges(self._queued, self._limit)

    def admit(self, nonces: int) -> None:
        """Add ``nonces``; ``leave`` must follow. Raises Refused and then adds nothing."""
        if self._queued + nonces > self._limit:
            text = f"Queue full: {self._queued} nonces queued, limit is {self._limit}"
            raise Refused(Refusal.QUEUE_FULL, text)
        self._queued += nonces

    def leave(self, nonces: int) -> None:
        self._queued -= nonces

    @contextmanager
    def admitted(self, nonces: int) -> Iterator[None]:
        self.admit(nonces)
        try:
            yield
        finally:
            self.leave(nonces)


@dataclass(frozen=True, slots=True)
class Computation:
    """What ``engine`` computes for jobs and for judgements, counted in ``totals``.

    Jobs run while ``no_round`` is set, judgements also while a round or a job runs (A.4, A.5).
    ``admission`` counts the nonces that wait. Chat may defer one chunk of nonces for
    ``chunk_timeout_s``, in seconds of ``clock``.
    """

    engine: ProofEngine
    no_round: asyncio.Event
    admission: NonceLimit
    chunk_timeout_s: float
    totals: NodeTotals
    clock: Callable[[], float]

    async def run(self, job: Job, started: Callable[[], None]) -> Outcome:
        """The outcome of ``job``; ``started`` is called before the first engine call.

        If a round starts meanwhile, the job gives its lease back and waits for the round's end.

        Raises EngineFault (a chunk failed, or chat deferred it past the deadline), EngineGone and
        ProtocolError (the claims cannot be judged).
        """
        if job.claims is not None:
            return await self.totals.judged(self._validate(job, job.claims, started))
        done = await self._prove(job, started)
        # In a thread: encoding thousands of vectors would block the event loop that serves chat.
        artifacts = await asyncio.to_thread(lambda: [*chain.from_iterable(map(artifacts_of, done))])
        failed = (nonce for batch in done for nonce in batch.failed)
        return Proofs(tuple(artifacts), dict.fromkeys(failed, NOT_FINITE))

    async def _validate(
        self, job: Job, claims: Sequence[Claim], started: Callable[[], None]
    ) -> Verdict:
        done = await self._prove(job, started)
        return await asyncio.to_thread(validate, job.work, job.nonces, claims, done, job.test)

    async def _prove(self, job: Job, started: Callable[[], None]) -> list[ProofBatch]:
        todo = deque(chunks(job.nonces, job.batch_size))
        done: list[ProofBatch] = []
        work: Purpose = "job" if job.claims is None else "validation"
        while todo:
            await self.no_round.wait()
            started()
            async with self.engine.session(job.work) as prove:
                while todo and self.no_round.is_set():
                    width = job.work.scheme.width
                    batch = await self._until_computed(prove, todo[0], width)
                    self.totals.computed(work, len(batch.nonces), len(batch.failed))
                    done.append(batch)
                    todo.popleft()
        return done

    async def judge(
        self, spec: RoundSpec, target: Target, claims: DistanceClaims
    ) -> DistanceVerdict:
        """Judge ``claims`` by the parameters of the round ``spec`` and the prover's public key.

        Raises Refused (OTHER_ROUND, QUEUE_FULL), EngineFault (the recomputation is incomplete, or
        chat deferred it past the deadline), EngineGone and ProtocolError (as
        ``comparison.compare_distances``).
        """
        for field in ("hash", "height"):
            claimed, ours = getattr(claims.block, field), getattr(spec.work.block, field)
            if claimed != ours:
                text = f"block_{field} {claimed!r} is not the {ours!r} of the configured round"
                raise Refused(Refusal.OTHER_ROUND, text)
        return await self.totals.judged(self._recompute(spec, target, claims))

    async def _recompute(
        self, spec: RoundSpec, target: Target, claims: DistanceClaims
    ) -> DistanceVerdict:
        work = replace(spec.work, public_key=claims.public_key)
        with self.admission.admitted(len(claims.nonces)):
            async with self.engine.session(work) as prove:
                done = [
                    await self._until_computed(prove, chunk, work.scheme.width)
                    for chunk in chunks(claims.nonces, spec.batch_size)
                ]
        return await asyncio.to_thread(_judged, target, claims, done)

    async def _until_computed(self, prove: Prove, nonces: Sequence[int], width: int) -> ProofBatch:
        """Ask again while chat defers, but not for ever. Raises EngineFault and EngineGone."""
        deadline = self.clock() + self.chunk_timeout_s
        while True:
            answer = await ask(prove, nonces, width)
            if not isinstance(answer, Deferred):
                return answer
            if self.clock() >= deadline:
                raise EngineFault(
                    f"skipped: chat delayed a chunk for more than {self.chunk_timeout_s:g} s"
                    f" ({answer.reason})"
                )


def validate(
    work: Workload,
    nonces: Sequence[int],
    claims: Sequence[Claim],
    recomputed: Sequence[ProofBatch],
    test: StatTest,
) -> Verdict:
    """Judge ``claims`` about ``nonces`` by the batches in ``recomputed``.

    Raises EngineFault (the recomputation is incomplete, so no verdict is possible) and
    ProtocolError as ``comparison.compare``.
    """
    with _complete(recomputed):
        ours = {
            nonce: row
            for batch in recomputed
            for nonce, row in zip(batch.nonces, batch.values, strict=True)
        }
        found = compare(nonces, ours, claims, test.dist_threshold, work.scheme.width)
    by_test = judge(found.n_mismatch, found.n_total, test.p_mismatch, test.fraud_threshold)
    counts = (found.n_total, found.n_mismatch, found.mismatch_nonces)
    return Verdict(*counts, by_test.p_value, by_test.fraud_detected)


@contextmanager
def _complete(recomputed: Sequence[ProofBatch]) -> Iterator[None]:
    """Raise EngineFault if ``recomputed`` or the comparison in the context lacks a nonce."""
    for batch in recomputed:
        for nonce in batch.failed:
            raise EngineFault(f"no verdict is possible: nonce {nonce}: {NOT_FINITE}")
    try:
        yield
    except IncompleteRecomputation as error:
        raise EngineFault(f"no verdict is possible: {error}") from error


def _judged(target: Target, claims: DistanceClaims, done: Sequence[ProofBatch]) -> DistanceVerdict:
    with _complete(done):
        computed = tuple(distance for batch in done for distance in distances_of(batch))
        found = compare_distances(claims.nonces, computed, claims.distances, target.r_target)
    invalid = frozenset(found.mismatch_nonces)
    valid = tuple(nonce not in invalid for nonce in claims.nonces)
    by_test = judge_distances(found.n_mismatch, found.n_total, target.fraud_threshold)
    return DistanceVerdict(claims, target, computed, valid, by_test.p_value, by_test.fraud_detected)


def winners_among(verdict: DistanceVerdict) -> int:
    return sum(is_winner(distance, verdict.target.r_target) for distance in verdict.computed)


async def self_check(engine: ProofEngine) -> None:
    """Run one small forward on every core at once. Raises Refused (CHAT_BUSY) and as ``ask``."""
    checks = (_check_core(engine, core) for core in range(engine.cores))
    for result in await asyncio.gather(*checks, return_exceptions=True):
        if result is not None:
            raise result


async def _check_core(engine: ProofEngine, core: int) -> None:
    tried = scheme(DEFAULT_SCHEME)
    work = Workload(tried, BLOCK, KEY, min(SEQ_LEN, engine.engine_info.max_seq_len))
    of_core = f"engine core {core}: " if engine.cores > 1 else ""
    try:
        async with engine.session(work, core) as prove:
            answer = await ask(prove, NONCES, tried.width)
    except EngineFault as fault:
        raise EngineFault(f"{of_core}{fault}") from fault
    if isinstance(answer, Deferred):
        text = f"chat is busy: no forward could run within {answer.seconds:.1f} s"
        raise Refused(Refusal.CHAT_BUSY, f"{of_core}{text}")
    if answer.failed:
        raise EngineFault(f"{of_core}{NOT_FINITE}")
