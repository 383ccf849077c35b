"""An engine's answer, believed only after a look, and turned into what is published."""

from collections.abc import Sequence

import numpy as np

from proofserve.protocol.codec import encode, to_float16
from proofserve.protocol.distance import is_winner
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import Artifact, Finding, ProofBatch, Target, Winner

NOT_FINITE = "the model's output for this nonce was not finite"


def checked(batch: ProofBatch, nonces: Sequence[int], width: int) -> ProofBatch:
    """``batch``, if it accounts for every one of ``nonces`` with finite rows of ``width``.

    Raises:
        EngineFault: it does not, so nothing of it may be used.
    """
    failed = frozenset(batch.failed)
    expected = tuple(nonce for nonce in nonces if nonce not in failed)
    if batch.nonces != expected or not failed <= frozenset(nonces):
        raise EngineFault("the engine answered for other nonces than it was asked for")
    if batch.values.shape != (len(expected), width):
        raise EngineFault(
            f"the engine answered with shape {batch.values.shape}"
            f" where {(len(expected), width)} is needed"
        )
    # Looked at as the wire carries it: float16 ends long before float32.
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


def artifacts_of(batch: ProofBatch) -> tuple[Artifact, ...]:
    """The published form of every row."""
    texts = encode(batch.values)
    return tuple(Artifact(n, text) for n, text in zip(batch.nonces, texts, strict=True))


def failures_of(batch: ProofBatch) -> dict[int, str]:
    """Why the nonces without a row have none."""
    return dict.fromkeys(batch.failed, NOT_FINITE)
