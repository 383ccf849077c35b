"""Small rounds, members, callbacks of them, and jobs about them."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import select

from proofserve.fleet.callback_bodies import read
from proofserve.fleet.records import (
    BatchKind,
    DesiredState,
    FleetRound,
    Lane,
    Member,
    MemberFindings,
    MemberLook,
    MemberSource,
)
from proofserve.fleet.sql.rounds import find_round, lanes_where
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.sql.tables import jobs, rounds
from proofserve.fleet.verification_records import JobCause, VerificationJob, VerificationRule
from proofserve.protocol.codec import encode
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.schemes import scheme
from proofserve.rounds.errors import Refused
from proofserve.rounds.records import RoundSpec, Target, Workload

WIDTH = 12
R_TARGET = 1.4
MARK = VerificationRule(nonces=4, every_s=1)


def a_spec(round_id: str = "r1", url: str | None = None, roots: bool = False) -> RoundSpec:
    work = Workload(scheme("artifact-v1", k_dim=WIDTH), Block("b10c", 77), "k3y", 256)
    return RoundSpec(round_id, work, NonceLane(3, 4, 1, 2), 32, url, commits_roots=roots)


def a_distance_spec(round_id: str = "d1", url: str | None = None) -> RoundSpec:
    work = Workload(scheme("distance-v1"), Block("b10c", 77), "k3y", 256)
    return RoundSpec(round_id, work, NonceLane(3, 4), 32, url, Target(R_TARGET))


async def a_lane(
    store: FleetStore, spec: RoundSpec | None = None, lanes: int = 8, name: str = "m1"
) -> tuple[FleetRound, Lane]:
    """A new round with one lane, which the member ``name`` has."""
    opened = await store.open_round(spec or a_spec(), lanes)
    return opened, await another_lane(store, opened, name)


async def another_lane(store: FleetStore, opened: FleetRound, name: str) -> Lane:
    member = await store.put_member(f"http://{name}:8000", name, MemberSource.LIST)
    return await give_lane(store, opened.id, member.id)


async def give_lane(store: FleetStore, round_id: str, member_id: str) -> Lane:
    """One lane. Raises why there is none."""
    (found,) = await store.give_lanes(round_id, [member_id])
    if isinstance(found, Refused):
        raise found
    return found


async def members_of(store: FleetStore) -> list[Member]:
    return list((await store.view()).members)


async def looks_of(store: FleetStore, url: str) -> list[MemberLook | None]:
    """The last look at each member, which another controller reads as this one knows it."""
    async with await FleetStore.open(url) as other:
        members = await members_of(other)
    assert members == await members_of(store)
    return [each.seen for each in members]


async def desired_of(store: FleetStore) -> DesiredState:
    return (await store.view()).desired


async def round_of(store: FleetStore, round_id: str) -> FleetRound | None:
    return await store.database.read(find_round, round_id)


async def lanes_of(store: FleetStore, round_id: str) -> list[Lane]:
    """The given lanes of a round, by number."""
    return await store.database.read(lanes_where, rounds.c.id == round_id)


async def attempts_of(store: FleetStore, job_id: str) -> int | None:
    """How often a job of verification was begun; None if there is no such job."""
    chosen = select(jobs.c.attempts).where(jobs.c.id == job_id)
    attempts: int | None = await store.database.read(lambda c: c.execute(chosen).scalar())
    return attempts


def nonces_of(opened: FleetRound, lane: Lane, start: int, size: int) -> tuple[int, ...]:
    return opened.nonces_of(lane.lane).batch(start, size)


def vectors_of(nonces: Sequence[int]) -> MemberFindings:
    """Vectors that are known by their nonces."""
    rows = np.array(nonces, np.float64)[:, None] % 97 + np.arange(WIDTH)
    numbers = np.array(nonces, np.int64)
    return MemberFindings(BatchKind.VECTORS, numbers, (rows / 128).astype("<f2"))


def texts_of(nonces: Sequence[int]) -> list[str]:
    return encode(vectors_of(nonces).values.astype(np.float32))


def winners_of(nonces: Sequence[int]) -> MemberFindings:
    numbers = np.array(nonces, np.int64)
    distances = np.float32(R_TARGET - 1 / (numbers % 97 + 3)).astype(np.float64)
    return MemberFindings(BatchKind.WINNERS, numbers, distances[:, None])


def head_of(spec: RoundSpec) -> dict[str, Any]:
    assert spec.lane is not None
    return {
        "public_key": spec.work.public_key,
        "block_hash": spec.work.block.hash,
        "block_height": spec.work.block.height,
        "node_id": spec.lane.node_id,
    }


def artifacts_body(spec: RoundSpec, nonces: Sequence[int]) -> dict[str, Any]:
    """The body of a member's callback."""
    pairs = zip(nonces, texts_of(nonces), strict=True)
    return {
        **head_of(spec),
        "artifacts": [{"nonce": nonce, "vector_b64": text} for nonce, text in pairs],
        "encoding": {"dtype": "f16", "k_dim": WIDTH, "endian": "le"},
    }


def roots_body(opened: FleetRound, lane: Lane, first: int, counts: Sequence[int]) -> dict[str, Any]:
    numbers = opened.nonces_of(lane.lane)
    roots = []
    for count in counts:
        previous = None if first == 0 else "cHJldmlvdXMgcm9vdCBvZiAzMiBieXRlcyEhISEhISE="
        root = "dGhpcyByb290IGhhcyAzMiBieXRlcywgYXMgbmVlZGU="
        each = {"first_index": first, "count": count, "root": root, "previous_root": previous}
        roots.append(each)
        first += count
    return {
        **head_of(opened.spec),
        "node_count": numbers.node_count,
        "group_id": numbers.group_id,
        "n_groups": numbers.n_groups,
        "round_id": "the member's",
        "roots": roots,
        "scheme": "artifact-v1",
        "encoding": {"dtype": "f16", "k_dim": WIDTH, "endian": "le"},
        "params": {"seq_len": 256},
    }


async def send(
    store: FleetStore, opened: FleetRound, lane: Lane, key: str, body: dict[str, Any]
) -> bool:
    """What the fleet does with a callback."""
    found = read(json.dumps(body).encode(), opened, lane.lane)
    return await store.ingest(opened, lane, key, found)


async def a_job(
    store: FleetStore, rule: VerificationRule = MARK, sizes: Sequence[int] = (8,)
) -> tuple[VerificationJob, Lane]:
    """A job about all artifacts of a new lane, which has a batch of each of ``sizes``."""
    opened, lane = await a_lane(store, a_spec(uuid.uuid4().hex))
    start = 0
    for size in sizes:
        found = vectors_of(nonces_of(opened, lane, start, size))
        await store.ingest(opened, lane, f"k{start}", found)
        start += size
    job = VerificationJob(
        id=uuid.uuid4().hex,
        member_id=lane.member_id,
        round_number=opened.number,
        lane=lane.lane,
        cause=JobCause.POLICY,
        queue="weights:aa",
        rule=rule,
        weights_digest="aa",
        model="toy",
        seed="seed",
        after_batch=0,
        through_batch=(await store.verdicts.newest_batches(opened.number))[lane.lane],
        asked_at=time.time(),
    )
    (job,) = await store.verdicts.add([job])
    return job, lane
