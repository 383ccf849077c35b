"""The bodies of callbacks, read fast: a fleet may get a million nonces a second.

The receiver's models give the same checks, and take some microseconds for each artifact. Vectors in
base64 are read and written many at a time, by the rules of ``protocol.codec`` (B.1.9, P.2.1).
"""

import binascii
import json
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from proofserve.fleet.records import BatchKind, FleetRound, MemberFindings
from proofserve.protocol.codec import decode
from proofserve.protocol.errors import MalformedVector, ProtocolError
from proofserve.protocol.nonces import MAX_NONCE, NonceLane
from proofserve.rounds.records import RoundSpec
from proofserve.wire.records import CommittedRoots, encoding_of, problems

_WIRE_DTYPE = np.dtype("<f2")
_PAD = ord("=")


class _Head(msgspec.Struct):
    """The fields of every callback; unknown ones are ignored, because newer nodes may send more."""

    block_hash: str
    block_height: int
    public_key: str
    node_id: int


# Without the collector, which would look at a million objects again and again.
class _SentArtifact(msgspec.Struct, gc=False):
    nonce: int
    vector_b64: str


class _SentEncoding(msgspec.Struct):
    dtype: str
    k_dim: int
    endian: str


class _VectorsBody(_Head):
    encoding: _SentEncoding
    artifacts: list[_SentArtifact]


class _WinnersBody(_Head):
    r_target: float
    nonces: list[int]
    dist: list[float]


_VECTORS = msgspec.json.Decoder(_VectorsBody)
_WINNERS = msgspec.json.Decoder(_WinnersBody)


def read(body: bytes, round_: FleetRound, lane: int) -> MemberFindings:
    """What a member found, from the body of its ``/generated`` callback.

    Checks all of it: block, key and node number are those of the round, vectors have its width and
    finite values in canonical base64, distances are below its target, nonces are distinct and of
    this lane. Raises ProtocolError with the field. It needs no event loop; a large body takes
    tenths of a second, so call it in a thread.
    """
    spec, nonce_lane = round_.spec, round_.nonces_of(lane)
    try:
        if spec.target is not None:
            return _winners(_WINNERS.decode(body), spec, nonce_lane)
        if spec.commits_roots:
            return _roots(body, spec, nonce_lane)
        return _vectors(_VECTORS.decode(body), spec, nonce_lane)
    except msgspec.DecodeError as error:
        # The text ends in "at `$.artifacts[3].nonce`" if it is about one field.
        what, _, place = str(error).partition(" - at `$")
        raise ProtocolError(place.strip(".`") or "body", what) from error


def check_lane(nonces: NDArray[np.int64], lane: NonceLane, field: str) -> NDArray[np.int64]:
    """The indices of ``nonces`` in their lane. Raises ProtocolError for a nonce of another lane."""
    indices = lane.indices_of(nonces)
    if (strange := np.flatnonzero(indices < 0)).size:
        raise ProtocolError(field, f"nonce {nonces[strange[0]]} is not of the member's lane")
    return indices


def _vectors(body: _VectorsBody, spec: RoundSpec, lane: NonceLane) -> MemberFindings:
    _check_head(body, spec)
    width = spec.work.scheme.width
    encoding = msgspec.to_builtins(body.encoding)
    if encoding != encoding_of(width):
        raise ProtocolError("encoding", f"{encoding} where {encoding_of(width)} is needed")
    nonces = _nonces([each.nonce for each in body.artifacts], lane, "artifacts")
    try:
        vectors = decode_all([each.vector_b64 for each in body.artifacts], width)
    except MalformedVector as error:
        raise ProtocolError(f"artifacts.{error.field}", error.message) from error
    return MemberFindings(BatchKind.VECTORS, nonces, vectors)


def _winners(body: _WinnersBody, spec: RoundSpec, lane: NonceLane) -> MemberFindings:
    _check_head(body, spec)
    if spec.target is None or body.r_target != spec.target.r_target:
        raise ProtocolError("r_target", f"{body.r_target} is not the target of the round")
    if len(body.dist) != len(body.nonces):
        raise ProtocolError("dist", f"{len(body.dist)} values for {len(body.nonces)} nonces")
    nonces = _nonces(body.nonces, lane, "nonces")
    distances = np.array(body.dist, "<f8")
    wrong = np.flatnonzero(~((distances >= 0) & (distances < body.r_target)))
    if wrong.size:
        place = wrong[0]
        raise ProtocolError(f"dist.{place}", f"{distances[place]} is not in 0 .. {body.r_target}")
    return MemberFindings(BatchKind.WINNERS, nonces, distances[:, None])


def _roots(raw: bytes, spec: RoundSpec, lane: NonceLane) -> MemberFindings:
    try:
        body = CommittedRoots.model_validate_json(raw)
    except ValidationError as error:
        first = problems(error.errors())[0]
        raise ProtocolError(".".join(map(str, first["loc"])) or "body", first["msg"]) from error
    _check_work(body, spec)
    work = spec.work
    if not body.lane.is_part_of(lane):
        raise ProtocolError("group_id", f"{body.lane} is not of the member's lane, {lane}")
    for field, has, needs in (
        ("scheme", body.scheme, work.scheme.name),
        ("encoding", body.encoding.model_dump(), encoding_of(work.scheme.width)),
        ("params.seq_len", body.params.seq_len, work.seq_len),
    ):
        if has != needs:
            raise ProtocolError(field, f"{has} where the round has {needs}")
    end = 0
    for place, each in enumerate(body.roots):
        if each.first_index < end:
            raise ProtocolError(
                f"roots.{place}.first_index", "the batch begins within the one before"
            )
        end = each.first_index + each.count
    firsts = np.array([body.lane.nonce(each.first_index) for each in body.roots], np.int64)
    nothing = np.empty((len(firsts), 0), np.uint8)
    return MemberFindings(BatchKind.ROOTS, firsts, nothing, body, json.loads(raw))


def _check_head(body: _Head, spec: RoundSpec) -> None:
    _check_work(body, spec)
    if spec.lane is None or body.node_id != spec.lane.node_id:
        raise ProtocolError("node_id", f"{body.node_id} is not the node number of the round")


def _check_work(body: "_Head | CommittedRoots", spec: RoundSpec) -> None:
    work = spec.work
    for field, has, needs in (
        ("block_hash", body.block_hash, work.block.hash),
        ("block_height", body.block_height, work.block.height),
        ("public_key", body.public_key, work.public_key),
    ):
        if has != needs:
            raise ProtocolError(field, f"{has!r} where the round has {needs!r}")


def _nonces(numbers: list[int], lane: NonceLane, field: str) -> NDArray[np.int64]:
    try:
        nonces = np.array(numbers, np.int64)
    except OverflowError:
        raise ProtocolError(field, f"a nonce is outside 0..{MAX_NONCE}") from None
    check_lane(nonces, lane, field)
    if np.unique(nonces).size != nonces.size:
        raise ProtocolError(field, "a nonce occurs twice")
    return nonces


# -- vectors in base64 -----------------------------------------------------------------------------


def decode_all(texts: Sequence[str], width: int) -> NDArray[np.float16]:
    """The vectors float16 [n, width] of ``texts``, little-endian.

    Raises MalformedVector for the first text that ``codec.decode`` refuses; the field is its place.
    """
    vectors = _decoded(texts, width)
    if vectors is None:
        # Something is wrong with one of them: the slow reader says what.
        for place, text in enumerate(texts):
            try:
                decode(text, width)
            except MalformedVector as error:
                raise MalformedVector(f"{place}.{error.field}", error.message) from error
        raise AssertionError("each vector is accepted, and all of them together are not")
    return vectors


def encode_all(vectors: NDArray[np.float16]) -> list[str]:
    """One text for each row of ``vectors``, little-endian float16 [n, width]."""
    size = vectors.shape[1] * _WIRE_DTYPE.itemsize
    raw = np.ascontiguousarray(vectors).tobytes()
    rows = [raw[start : start + size] for start in range(0, len(raw), size)]
    return [binascii.b2a_base64(row, newline=False).decode("ascii") for row in rows]


def _decoded(texts: Sequence[str], width: int) -> NDArray[np.float16] | None:
    """All vectors, or None if any text is malformed."""
    size = width * _WIRE_DTYPE.itemsize
    pads = -size % 3
    length = (size + pads) // 3 * 4
    if any(len(text) != length for text in texts):
        return None
    try:
        joined = "".join(texts).encode("ascii")
        if pads:
            chars = np.frombuffer(joined, np.uint8).reshape(-1, length).copy()
            if (chars[:, -pads:] != _PAD).any():
                return None
            # As zeros: the bytes that they lead to are zero unless unused bits are set.
            chars[:, -pads:] = ord("A")
            joined = chars.tobytes()
        raw = np.frombuffer(binascii.a2b_base64(joined, strict_mode=True), np.uint8)
    except (UnicodeEncodeError, binascii.Error):
        return None
    if raw.size != len(texts) * (size + pads):
        return None
    rows = raw.reshape(len(texts), size + pads)
    if rows[:, size:].any():
        return None
    vectors = np.ascontiguousarray(rows[:, :size]).view(_WIRE_DTYPE)
    return vectors if np.isfinite(vectors).all() else None
