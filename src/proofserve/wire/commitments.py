"""Roots in callbacks, and openings in the answers of ``POST /open``: hashes are in base64."""

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from proofserve.protocol.commitments import CommittedBatch, Opening
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.nonces import MAX_NONCE, NonceLane
from proofserve.wire.records import UnicodeText, VectorEncoding, Whole, WorkRecord, artifact_record

# Bytes of SHA-256.
_HASH = 32
# A path has one hash for each doubling of the batch: more than 63 cannot occur.
_LONGEST_PATH = 63 * _HASH


def hash_text(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode("ascii")


def _bytes(text: object) -> bytes:
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise PydanticCustomError("base64", "is not base64")


def _hash(text: object) -> bytes:
    raw = _bytes(text)
    if len(raw) != _HASH:
        raise PydanticCustomError("hash", "{n} bytes where 32 are needed", {"n": len(raw)})
    return raw


def _path(text: object) -> tuple[bytes, ...]:
    raw = _bytes(text)
    if len(raw) % _HASH or len(raw) > _LONGEST_PATH:
        raise PydanticCustomError("path", "{n} bytes are not a list of hashes", {"n": len(raw)})
    return tuple(raw[start : start + _HASH] for start in range(0, len(raw), _HASH))


Hash = Annotated[bytes, BeforeValidator(_hash)]
HashPath = Annotated[tuple[bytes, ...], BeforeValidator(_path)]


class RootRecord(BaseModel):
    """A batch of a round: ``count`` nonces of the lane from ``first_index`` on, and their root."""

    first_index: Whole
    count: int = Field(ge=1, le=MAX_NONCE)
    root: Hash
    previous_root: Hash | None

    @model_validator(mode="after")
    def _is_chained(self) -> "RootRecord":
        if (self.previous_root is None) is not (self.first_index == 0):
            raise PydanticCustomError(
                "chain", "previous_root is null for the batch at index 0, and for no other"
            )
        return self

    @property
    def batch(self) -> CommittedBatch:
        return CommittedBatch(self.first_index, self.count, self.root, self.previous_root)


class RoundParams(BaseModel):
    seq_len: int = Field(ge=1)


class CommittedWork(WorkRecord):
    """The round of the ``roots``: all that a validator must know to check its vectors."""

    round_id: UnicodeText
    node_id: Whole
    node_count: Whole
    group_id: Whole
    n_groups: Whole
    scheme: UnicodeText
    encoding: VectorEncoding
    params: RoundParams
    roots: list[RootRecord]

    @model_validator(mode="after")
    def _has_lane(self) -> "CommittedWork":
        try:
            lane = self.lane
            for each in self.roots:
                lane.nonce(each.first_index + each.count - 1)
        except ProtocolError as error:
            raise PydanticCustomError("lane", "{why}", {"why": str(error)}) from error
        return self

    @property
    def lane(self) -> NonceLane:
        """Raises ProtocolError."""
        return NonceLane(self.node_id, self.node_count, self.group_id, self.n_groups)


class OpeningRecord(BaseModel):
    """What a validator needs of an opening; it knows the batch already, and trusts its own copy."""

    nonce: Whole
    vector_b64: str
    path: HashPath


def root_record(batch: CommittedBatch) -> dict[str, Any]:
    return {
        "first_index": batch.first_index,
        "count": batch.count,
        "root": hash_text(batch.root),
        "previous_root": hash_text(batch.previous_root),
    }


def opening_record(opening: Opening) -> Mapping[str, Any]:
    return {
        **artifact_record(opening.nonce, opening.vector_b64),
        "index": opening.index,
        "first_index": opening.batch.first_index,
        "count": opening.batch.count,
        "root": hash_text(opening.batch.root),
        # One text of all hashes, from the leaf upwards: short, and quick to decode.
        "path": hash_text(b"".join(opening.path)),
    }
