"""From claims and our own recomputation to a verdict, or to no verdict at all."""

from collections.abc import Sequence

from proofserve.protocol.comparison import Claim, compare
from proofserve.protocol.errors import IncompleteRecomputation
from proofserve.protocol.statistics import judge
from proofserve.rounds.batches import NOT_FINITE
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import ProofBatch, StatTest, Verdict, Workload


def validate(
    work: Workload,
    nonces: Sequence[int],
    claims: Sequence[Claim],
    recomputed: Sequence[ProofBatch],
    test: StatTest,
) -> Verdict:
    """Judge ``claims`` about ``nonces`` by the batches in ``recomputed``.

    Raises:
        EngineFault: the recomputation has a gap, so there is nothing to judge by.
        ProtocolError: the claims or the test cannot be judged (see ``comparison.compare``).
    """
    for batch in recomputed:
        for nonce in batch.failed:
            raise EngineFault(f"no verdict is possible: nonce {nonce}: {NOT_FINITE}")
    ours = {
        nonce: row
        for batch in recomputed
        for nonce, row in zip(batch.nonces, batch.values, strict=True)
    }
    try:
        found = compare(nonces, ours, claims, test.dist_threshold, work.scheme.width)
    except IncompleteRecomputation as error:
        raise EngineFault(f"no verdict is possible: {error}") from error
    n_mismatch = len(found.mismatches)
    verdict = judge(n_mismatch, found.n_total, test.p_mismatch, test.fraud_threshold)
    return Verdict(
        n_total=found.n_total,
        n_mismatch=n_mismatch,
        mismatch_nonces=tuple(mismatch.nonce for mismatch in found.mismatches),
        p_value=verdict.p_value,
        fraud_detected=verdict.fraud_detected,
    )
