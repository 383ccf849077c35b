"""The proofs of some nonces by one member."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter, ValidationError

from proofserve.fleet.members.client import MemberClient, NonsenseAnswered
from proofserve.fleet.members.member_status import MemberDeployment, MemberStatus, read_status
from proofserve.fleet.orders import judge_order, judging_order, prove_order
from proofserve.protocol.codec import decode
from proofserve.protocol.distance import DistanceScheme
from proofserve.protocol.errors import MalformedVector
from proofserve.rounds.records import Workload
from proofserve.wire.records import ArtifactRecord, Whole


@dataclass(frozen=True, slots=True)
class ShareRows:
    """What a member computed: a float32 row for each nonce, and the nonces without a result."""

    rows: Mapping[int, NDArray[np.float32]]
    failed: frozenset[int] = frozenset()


class _FailedNonce(BaseModel):
    nonce: Whole


class _Proved(BaseModel):
    artifacts: list[ArtifactRecord]
    failed: list[_FailedNonce] = []


class _Judged(BaseModel):
    computed_distances: list[Annotated[FiniteFloat, Field(ge=0, le=3)]]


_PROVED, _JUDGED = TypeAdapter(_Proved), TypeAdapter(_Judged)


async def compute_share(
    client: MemberClient, work: Workload, nonces: Sequence[int], deployed: MemberDeployment
) -> ShareRows:
    """The proofs of ``nonces`` by this member. Raises MemberError."""
    try:
        if isinstance(work.scheme, DistanceScheme):
            return await _distances(client, work, nonces)
        return await _vectors(client, work, nonces, deployed)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise NonsenseAnswered(f"answered nonsense to a job: {field}: {first['msg']}") from error


async def _status(client: MemberClient) -> MemberStatus:
    try:
        return read_status((await client.status()).body)
    except ValueError as error:
        raise NonsenseAnswered(f"answered nonsense to GET /status: {error}") from error


async def _vectors(
    client: MemberClient, work: Workload, nonces: Sequence[int], deployed: MemberDeployment
) -> ShareRows:
    proved = _PROVED.validate_python(await client.prove(prove_order(work, nonces, deployed)))
    try:
        rows = {each.nonce: decode(each.vector_b64, work.scheme.width) for each in proved.artifacts}
    except MalformedVector as error:
        raise NonsenseAnswered(f"answered nonsense to a job: {error}") from error
    failed = frozenset(each.nonce for each in proved.failed)
    if rows.keys() | failed != set(nonces) or rows.keys() & failed:
        raise NonsenseAnswered("answered for other nonces than it was asked for")
    return ShareRows(rows, failed)


async def _distances(client: MemberClient, work: Workload, nonces: Sequence[int]) -> ShareRows:
    config = (await _status(client)).config
    if config is None or not config.judges(work):
        # Not always: this replaces the configured round, which may go on in its lane later.
        await client.configure(judging_order(work))
    answer = await client.judge(judge_order(work, nonces))
    computed = _JUDGED.validate_python(answer).computed_distances
    if len(computed) != len(nonces):
        raise NonsenseAnswered("answered for other nonces than it was asked for")
    rows = zip(nonces, computed, strict=True)
    return ShareRows({nonce: np.array([value], np.float32) for nonce, value in rows})
