"""Compares claims with a recomputation: every requested nonce agrees or is a named mismatch.

No nonce is skipped (protocol P.2.1). A fault of the prover is a mismatch. A gap in the validator's
own recomputation, or a request that cannot be compared, is an error and gives no verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.codec import decode, to_float16
from proofserve.protocol.errors import IncompleteRecomputation, MalformedVector, ProtocolError
from proofserve.protocol.nonces import check_nonces


class Reason(StrEnum):
    MISSING = "missing"
    EMPTY = "empty"
    DUPLICATE = "duplicate"
    MALFORMED = "malformed"
    NOT_FINITE = "not finite"
    TOO_FAR = "too far"
    # Of a lane: the prover claims later nonces, and leaves this one out.
    GAP = "left out"
    # Of vectors under a root: the node shows one that is not under it.
    NOT_COMMITTED = "not committed"


@dataclass(frozen=True)
class Claim:
    nonce: int
    vector_b64: str


@dataclass(frozen=True)
class Mismatch:
    """A requested nonce with an invalid claim; ``distance`` if the claim could be decoded."""

    nonce: int
    reason: Reason
    distance: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class Comparison:
    """The outcome over all requested nonces, in their order."""

    n_total: int
    mismatches: tuple[Mismatch, ...]

    @property
    def n_mismatch(self) -> int:
        return len(self.mismatches)

    @property
    def mismatch_nonces(self) -> tuple[int, ...]:
        return tuple(mismatch.nonce for mismatch in self.mismatches)


def compare(
    nonces: Sequence[int],
    computed: Mapping[int, NDArray[np.float32]],
    claims: Sequence[Claim],
    dist_threshold: float,
    k_dim: int,
) -> Comparison:
    """Compare artifact claims with our vectors, both as the float16 of the wire (B.4, P.2.1).

    A claim is valid iff it is the nonce's only one, decodes strictly, and lies within
    ``dist_threshold`` (L2, float32). Raises ProtocolError for repeated or out-of-range nonces, for
    claims about nonces that were not requested and for a threshold that is negative or not finite,
    and IncompleteRecomputation unless ``computed`` has a finite vector [k_dim] for every nonce.
    """
    check_nonces("nonces", nonces)
    if not 0 <= dist_threshold < math.inf:
        raise ProtocolError("dist_threshold", f"{dist_threshold} is not a finite number from 0 on")
    errors = claim_errors(nonces, computed, claims, k_dim)
    found = (mismatch_of(error, dist_threshold) for error in errors)
    return Comparison(len(nonces), tuple(each for each in found if each is not None))


@dataclass(frozen=True, slots=True)
class ClaimError:
    """A claim less our vector: ``error`` float32 [k_dim], or ``broken`` if there is no vector.

    ``distance`` is the length of ``error``; a claim without a vector is infinitely far.
    """

    nonce: int
    error: NDArray[np.float32] | None
    broken: Mismatch | None = None
    distance: float = field(init=False)

    def __post_init__(self) -> None:
        length = math.inf if self.error is None else float(np.linalg.norm(self.error))
        object.__setattr__(self, "distance", length)


def claim_errors(
    nonces: Sequence[int],
    computed: Mapping[int, NDArray[np.float32]],
    claims: Sequence[Claim],
    k_dim: int,
) -> tuple[ClaimError, ...]:
    """The error of every nonce's claim, in the order of ``nonces``; raises as ``compare``."""
    texts = _texts_by_nonce(nonces, claims)
    ours = {nonce: _wire_vector(nonce, computed, k_dim) for nonce in nonces}
    return tuple(_claim_error(nonce, ours[nonce], texts[nonce]) for nonce in nonces)


def compare_distances(
    nonces: Sequence[int], computed: Sequence[float], received: Sequence[float], r_target: float
) -> Comparison:
    """Compare distance claims with our distances, pairwise in the order of ``nonces`` (A.4, P.2.2).

    A claim is valid iff it is finite and below ``r_target`` and our distance is not above it.
    Raises ProtocolError for unequal lengths, repeated or out-of-range nonces and a radius that is
    not finite, and IncompleteRecomputation when a distance of ours is not finite.
    """
    check_nonces("nonces", nonces)
    if not math.isfinite(r_target):
        raise ProtocolError("r_target", f"{r_target} is not finite")
    for name, values in (("computed", computed), ("received", received)):
        if len(values) != len(nonces):
            raise ProtocolError(name, f"{len(values)} distances for {len(nonces)} nonces")
    mismatches = []
    for nonce, ours, theirs in zip(nonces, computed, received, strict=True):
        if not math.isfinite(ours):
            raise IncompleteRecomputation("computed", f"the distance of nonce {nonce} is {ours}")
        if not math.isfinite(theirs):
            mismatches.append(Mismatch(nonce, Reason.NOT_FINITE, ours, f"received {theirs}"))
        elif theirs >= r_target or ours > r_target:
            mismatches.append(Mismatch(nonce, Reason.TOO_FAR, ours, f"received {theirs}"))
    return Comparison(len(nonces), tuple(mismatches))


def _texts_by_nonce(nonces: Sequence[int], claims: Sequence[Claim]) -> dict[int, list[str]]:
    texts: dict[int, list[str]] = {nonce: [] for nonce in nonces}
    for claim in claims:
        if claim.nonce not in texts:
            raise ProtocolError("claims", f"nonce {claim.nonce} was not requested")
        texts[claim.nonce].append(claim.vector_b64)
    return texts


def _wire_vector(
    nonce: int, computed: Mapping[int, NDArray[np.float32]], k_dim: int
) -> NDArray[np.float32]:
    if nonce not in computed:
        raise IncompleteRecomputation("computed", f"nonce {nonce} is missing")
    vector = to_float16(computed[nonce]).astype(np.float32)
    if vector.shape != (k_dim,):
        raise IncompleteRecomputation("computed", f"nonce {nonce} has shape {vector.shape}")
    if not np.isfinite(vector).all():
        raise IncompleteRecomputation("computed", f"the vector of nonce {nonce} is not finite")
    return vector


def _claim_error(nonce: int, ours: NDArray[np.float32], texts: list[str]) -> ClaimError:
    def broken(reason: Reason, detail: str = "") -> ClaimError:
        return ClaimError(nonce, None, Mismatch(nonce, reason, detail=detail))

    if not texts:
        return broken(Reason.MISSING)
    if len(texts) > 1:
        return broken(Reason.DUPLICATE, f"claimed {len(texts)} times")
    if not texts[0]:
        return broken(Reason.EMPTY)
    try:
        theirs = decode(texts[0], len(ours))
    except MalformedVector as error:
        return broken(Reason.MALFORMED, error.message)
    return ClaimError(nonce, theirs - ours)


def mismatch_of(claim: ClaimError, dist_threshold: float) -> Mismatch | None:
    """What is wrong with a claim: it has no vector, or one further than ``dist_threshold``."""
    if claim.broken is not None:
        return claim.broken
    # The comparison of a validator is in float32 (B.4).
    if np.float32(claim.distance) > np.float32(dist_threshold):
        return Mismatch(claim.nonce, Reason.TOO_FAR, claim.distance)
    return None
