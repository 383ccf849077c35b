"""A callback's findings as the columns of one row."""

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proofserve.fleet.callback_reader import check_lane
from proofserve.fleet.errors import BadCallback
from proofserve.fleet.records import (
    BatchKind,
    FleetRound,
    Lane,
    MemberFindings,
    MemberRoots,
    MemberVectors,
)

# As the API's own header allows.
_LONGEST_KEY = 200
_NONCES = np.dtype("<i8")


@dataclass(frozen=True, slots=True, eq=False)
class NewBatch:
    """What is to be stored: arrays of the same length [n], and the rows of ``found`` for them.

    ``indices`` are those of ``nonces`` in the lane. ``counts`` has how many nonces each one stands
    for: 1, or the size of a root's batch. ``found`` is uint8 [n, bytes per row]. ``roots`` is the
    callback that ``body`` is of, if it has roots.
    """

    round_number: int
    lane: int
    callback_key: str
    kind: BatchKind
    nonces: NDArray[np.int64]
    indices: NDArray[np.int64]
    counts: NDArray[np.int64]
    found: NDArray[np.uint8]
    roots: MemberRoots | None = None
    body: dict[str, Any] | None = None

    @property
    def ends(self) -> NDArray[np.int64]:
        """The index behind the last nonce of each."""
        return self.indices + self.counts

    def without(self, known: NDArray[np.int64]) -> "NewBatch":
        """This batch without the nonces in ``known``."""
        kept = ~np.isin(self.nonces, known)
        if kept.all():
            return self
        body = self.body
        if body is not None:
            roots = [root for root, stays in zip(body["roots"], kept, strict=True) if stays]
            body = {**body, "roots": roots}
        return replace(
            self,
            nonces=self.nonces[kept],
            indices=self.indices[kept],
            counts=self.counts[kept],
            found=self.found[kept],
            body=body,
        )

    def columns(self, number: int, first_seq: int, now: float) -> dict[str, Any]:
        size = len(self.nonces)
        results = 0 if self.kind is BatchKind.ROOTS else size
        return {
            "number": number,
            "round": self.round_number,
            "lane": self.lane,
            "callback_key": self.callback_key,
            "kind": self.kind.value,
            "first_seq": first_seq,
            "last_seq": first_seq + results - 1,
            "count": int(self.counts.sum()),
            "first_index": int(self.indices.min()) if size else None,
            "last_index": int(self.ends.max()) - 1 if size else None,
            "stored_at": now,
            "nonces": self.nonces.astype(_NONCES).tobytes(),
            "row_bytes": self.found.shape[1],
            "found": self.found.tobytes(),
            "body": None if self.body is None else json.dumps(self.body, separators=(",", ":")),
        }


def new_batch(round_: FleetRound, lane: Lane, callback_key: str, found: MemberFindings) -> NewBatch:
    """Raises BadCallback for a nonce of another lane, and for a key that cannot be stored."""
    if not (callback_key.isascii() and callback_key.isprintable()):
        raise BadCallback("Idempotency-Key", "it has characters outside ASCII")
    if not 1 <= len(callback_key) <= _LONGEST_KEY:
        raise BadCallback("Idempotency-Key", f"it has not 1..{_LONGEST_KEY} characters")
    indices = check_lane(found.nonces, round_.nonces_of(lane.lane), "nonces")
    counts = np.ones_like(indices)
    roots: MemberRoots | None = None
    body: dict[str, Any] | None = None
    if isinstance(found, MemberRoots):
        kind, rows = BatchKind.ROOTS, np.empty((len(indices), 0), np.uint8)
        counts, roots, body = found.counts, found, dict(found.body)
    elif isinstance(found, MemberVectors):
        kind, rows = BatchKind.VECTORS, _bytes(found.vectors.astype("<f2", copy=False))
    else:
        kind, rows = BatchKind.WINNERS, _bytes(found.distances.astype("<f8", copy=False)[:, None])
    return NewBatch(
        round_number=round_.number,
        lane=lane.lane,
        callback_key=callback_key,
        kind=kind,
        nonces=found.nonces,
        indices=indices,
        counts=counts,
        found=rows,
        roots=roots,
        body=body,
    )


def _bytes(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of each row."""
    size = rows.shape[1] * rows.itemsize
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), size)
