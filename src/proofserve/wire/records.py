"""Records that occur in several messages: a result and the encoding of vectors.

The pydantic models are the common base: the node's own models narrow them (no unknown keys, no
conversions), those of the receiver and the lab ignore fields that newer peers add.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from proofserve.protocol.nonces import MAX_NONCE
from proofserve.rounds.records import StoredResult


def _unicode(text: str) -> str:
    # JSON can hold half a surrogate pair, which cannot be encoded for a file or a hash.
    text.encode()
    return text


UnicodeText = Annotated[str, AfterValidator(_unicode)]
# Nonces, block heights and counts: what SQLite and every JSON reader of 64 bits can hold.
Whole = Annotated[int, Field(ge=0, le=MAX_NONCE)]


class VectorEncoding(BaseModel):
    """How vectors are written: ``k_dim`` float16 values, little-endian, in base64."""

    dtype: Literal["f16"]
    k_dim: int = Field(ge=1)
    endian: Literal["le"]


class ArtifactRecord(BaseModel):
    nonce: Whole
    vector_b64: str


class WorkRecord(BaseModel):
    """Which block the work is for, and the key of the node that claims it."""

    public_key: UnicodeText
    block_hash: UnicodeText
    block_height: Whole


def encoding_of(width: int) -> dict[str, Any]:
    """The JSON object of the encoding of vectors with ``width`` values."""
    return {"dtype": "f16", "k_dim": width, "endian": "le"}


def artifact_record(nonce: int, vector_b64: str | None) -> dict[str, Any]:
    return {"nonce": nonce, "vector_b64": vector_b64}


def result_record(row: StoredResult) -> dict[str, Any]:
    """A row as ``GET /results`` and ``proofserve outbox export`` show it."""
    known = {"seq": row.seq, "round_id": row.round_id}
    if row.error is not None:
        return {**known, "nonce": row.nonce, "error": row.error}
    if row.distance is not None:
        return {**known, "nonce": row.nonce, "dist": row.distance}
    return {**known, **artifact_record(row.nonce, row.value)}


def result_of(record: Mapping[str, Any]) -> StoredResult:
    """The row that ``result_record`` wrote. Raises KeyError."""
    return StoredResult(
        seq=record["seq"],
        round_id=record["round_id"],
        nonce=record["nonce"],
        value=record.get("vector_b64"),
        error=record.get("error"),
        distance=record.get("dist"),
    )
