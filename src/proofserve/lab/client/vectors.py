"""Artifacts as vectors: read, compare and forge them."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.codec import decode, encode
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.records import Artifact


def claims_of(artifacts: Sequence[Artifact]) -> list[Claim]:
    return [Claim(artifact.nonce, artifact.vector_b64) for artifact in artifacts]


def vectors_of(claims: Sequence[Claim], k_dim: int) -> Mapping[int, NDArray[np.float32]]:
    """The vector of each nonce. Raises MalformedVector for a vector without k finite numbers."""
    return {claim.nonce: decode(claim.vector_b64, k_dim) for claim in claims}


def distances(some: Sequence[Claim], others: Sequence[Claim], k_dim: int) -> list[float]:
    ours, theirs = vectors_of(some, k_dim), vectors_of(others, k_dim)
    return [float(np.linalg.norm(ours[nonce] - theirs[nonce])) for nonce in ours]


def tampered(claims: Sequence[Claim], k_dim: int, every: int) -> list[Claim]:
    """A copy in which every ``every``-th vector has its first two values swapped.

    Such a vector is still finite and of length 1, so only a recomputation shows the change.
    """
    return [
        Claim(claim.nonce, _swapped(claim.vector_b64, k_dim)) if index % every == 0 else claim
        for index, claim in enumerate(claims)
    ]


def _swapped(text: str, k_dim: int) -> str:
    vector = decode(text, k_dim)
    vector[[0, 1]] = vector[[1, 0]]
    return encode(vector[np.newaxis])[0]
