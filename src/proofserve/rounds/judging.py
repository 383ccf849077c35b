"""Judges claimed distances by recomputing them (protocol A.4, A.5, P.2.2)."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from proofserve.protocol.distance import is_winner
from proofserve.protocol.errors import IncompleteRecomputation
from proofserve.protocol.verdict.comparison import compare_distances
from proofserve.protocol.verdict.counting import judge_distances
from proofserve.rounds.calls import NOT_FINITE, ChunkDeadline, chunks, distances_of
from proofserve.rounds.counters import NodeTotals
from proofserve.rounds.errors import EngineFault, OtherRound
from proofserve.rounds.limits import NonceLimit
from proofserve.rounds.ports import ProofEngine
from proofserve.rounds.records import DistanceClaims, DistanceVerdict, ProofBatch, RoundSpec, Target


@dataclass(frozen=True, slots=True)
class Judging:
    """Recomputes and compares claimed distances, also while a round or a job runs."""

    engine: ProofEngine
    admission: NonceLimit
    deadline: ChunkDeadline
    totals: NodeTotals

    async def run(self, spec: RoundSpec, target: Target, claims: DistanceClaims) -> DistanceVerdict:
        """Judge ``claims`` by the parameters of the round ``spec`` and the prover's public key.

        Raises OtherRound (the claims are about another block), QueueFull (too many nonces wait for
        the engine), EngineFault (the recomputation is incomplete, or chat deferred it past the
        deadline), EngineGone and ProtocolError (as ``comparison.compare_distances``).
        """
        _require_same_block(spec, claims)
        return await self.totals.judged(self._recompute(spec, target, claims))

    async def _recompute(
        self, spec: RoundSpec, target: Target, claims: DistanceClaims
    ) -> DistanceVerdict:
        work = replace(spec.work, public_key=claims.public_key)
        with self.admission.admitted(len(claims.nonces)):
            async with self.engine.session(work) as session:
                done = [
                    await self.deadline.retry_until_deadline(session, chunk, work.scheme.width)
                    for chunk in chunks(claims.nonces, spec.batch_size)
                ]
        return await asyncio.to_thread(_judge, target, claims, done)


def winners_among(verdict: DistanceVerdict) -> int:
    return sum(is_winner(distance, verdict.target.r_target) for distance in verdict.computed)


def _require_same_block(spec: RoundSpec, claims: DistanceClaims) -> None:
    for field, claimed, ours in (
        ("block_hash", claims.block.hash, spec.work.block.hash),
        ("block_height", claims.block.height, spec.work.block.height),
    ):
        if claimed != ours:
            raise OtherRound(f"{field} {claimed!r} is not the {ours!r} of the configured round")


def _judge(target: Target, claims: DistanceClaims, done: Sequence[ProofBatch]) -> DistanceVerdict:
    for batch in done:
        for nonce in batch.failed:
            raise EngineFault(f"no verdict is possible: nonce {nonce}: {NOT_FINITE}")
    computed = tuple(distance for batch in done for distance in distances_of(batch))
    try:
        found = compare_distances(claims.nonces, computed, claims.distances, target.r_target)
    except IncompleteRecomputation as error:
        raise EngineFault(f"no verdict is possible: {error}") from error
    invalid = frozenset(found.mismatch_nonces)
    valid = tuple(nonce not in invalid for nonce in claims.nonces)
    by_test = judge_distances(found.n_mismatch, found.n_total, target.fraud_threshold)
    return DistanceVerdict(claims, target, computed, valid, by_test.p_value, by_test.fraud_detected)
