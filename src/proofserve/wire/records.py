"""What several messages share: results, roots, openings, and the protocol that a body speaks.

The pydantic models are the common base: the node's own models narrow them (no unknown keys, no
conversions), those of the receiver and the lab ignore fields that newer peers add. Hashes are in
base64.
"""

import base64
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from proofserve.protocol.commitments import CommittedBatch, Opening
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.nonces import MAX_NONCE, NonceLane
from proofserve.rounds.records import StoredResult

# Tags of a discriminated union. Pydantic puts the tag into the location of an error.
ARTIFACT = "artifact protocol"
DISTANCE = "distance protocol"
ROOTS = "artifact protocol, committed"

# Bytes of SHA-256.
_HASH = 32
# A path has one hash for each doubling of the batch: more than 63 cannot occur.
_LONGEST_PATH = 63 * _HASH


def _unicode(text: str) -> str:
    # JSON can hold half a surrogate pair, which cannot be encoded for a file or a hash.
    text.encode()
    return text


T = TypeVar("T")
# A field of an answer, to which None gives no place in the JSON.
OrLeftOut = Annotated[T | None, Field(exclude_if=lambda value: value is None)]
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


class FailedNonce(BaseModel):
    """A nonce of a job that has no artifact."""

    nonce: Whole
    error: str


class WorkRecord(BaseModel):
    """Which block the work is for, and the key of the node that claims it."""

    public_key: UnicodeText
    block_hash: UnicodeText
    block_height: Whole


def base64_bytes(text: object) -> bytes:
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except ValueError:
        pass
    raise PydanticCustomError("base64", "is not base64")


def _hash(text: object) -> bytes:
    raw = base64_bytes(text)
    if len(raw) != _HASH:
        raise PydanticCustomError("hash", "{n} bytes where 32 are needed", {"n": len(raw)})
    return raw


def _path(text: object) -> tuple[bytes, ...]:
    raw = base64_bytes(text)
    if len(raw) % _HASH or len(raw) > _LONGEST_PATH:
        raise PydanticCustomError("path", "{n} bytes are not a list of hashes", {"n": len(raw)})
    return tuple(raw[start : start + _HASH] for start in range(0, len(raw), _HASH))


_BASE64: dict[str, Any] = {"type": "string", "contentEncoding": "base64"}
_HASH_TEXT = WithJsonSchema({**_BASE64, "minLength": 44, "maxLength": 44})
Hash = Annotated[bytes, BeforeValidator(_hash), _HASH_TEXT]
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


class CommittedRoots(WorkRecord):
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
    def _has_lane(self) -> "CommittedRoots":
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


def encoding_of(width: int) -> dict[str, Any]:
    """The JSON object of the encoding of vectors with ``width`` values."""
    return {"dtype": "f16", "k_dim": width, "endian": "le"}


def artifact_record(nonce: int, vector_b64: str | None) -> dict[str, Any]:
    return {"nonce": nonce, "vector_b64": vector_b64}


def result_record(row: StoredResult) -> dict[str, Any]:
    """A row as ``GET /results`` and ``proofserve outbox export`` show it."""
    known = {"seq": row.seq, "round_id": row.round_id, "nonce": row.nonce}
    if row.error is not None:
        return {**known, "error": row.error}
    if row.distance is not None:
        return {**known, "dist": row.distance}
    return {**known, "vector_b64": row.value}


def result_of(record: Mapping[str, Any]) -> StoredResult:
    """The row that ``result_record`` wrote. Raises KeyError."""
    optional = map(record.get, ("vector_b64", "error", "dist"))
    return StoredResult(record["seq"], record["round_id"], record["nonce"], *optional)


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


def hash_text(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode("ascii")


# -- protocols -------------------------------------------------------------------------------------

# A body may have a hundred thousand faults, or one of a megabyte: the answer is cut to this.
_MAX_PROBLEMS = 20
_MAX_TEXT = 200


def by_field(artifact: str, distance: str, roots: str | None = None) -> Discriminator:
    """Choose the protocol by the field that only one has; several or none of them is an error."""
    tags = {artifact: ARTIFACT, distance: DISTANCE} | ({roots: ROOTS} if roots else {})

    def protocol_of(body: Any) -> str | None:
        if isinstance(body, BaseModel):
            body = type(body).model_fields
        found = [name for name in tags if name in body] if isinstance(body, dict) else []
        return tags[found[0]] if len(found) == 1 else None

    *others, last = (f"{name} ({tag})" for name, tag in tags.items())
    return Discriminator(
        protocol_of,
        custom_error_type="protocol",
        custom_error_message=f"exactly one of {', '.join(others)} and {last} is needed",
    )


def problems(errors: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Validation errors in FastAPI's form, without the input, which may be huge or not JSON."""
    return [
        {
            "type": error["type"],
            "loc": [
                part[:_MAX_TEXT] if isinstance(part, str) else part
                for part in error["loc"]
                if part not in (ARTIFACT, DISTANCE, ROOTS)
            ],
            "msg": _message(error)[:_MAX_TEXT],
        }
        for error in list(errors)[:_MAX_PROBLEMS]
    ]


def first_problem(error: ValidationError, nameless: str = "body") -> tuple[str, str]:
    """The first wrong field, with dots (``nameless`` for the whole), and what is wrong with it."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ".".join(map(str, first["loc"])) or nameless, first["msg"]


def _message(error: Mapping[str, Any]) -> str:
    # For a body that is not JSON, FastAPI has the reason beside the message.
    if error["type"] == "json_invalid":
        return f"{error['msg']}: {error['ctx']['error']}"
    if error["type"] == "missing" and tuple(error["loc"]) == ("body",):
        return "The request body is empty."
    return str(error["msg"])
