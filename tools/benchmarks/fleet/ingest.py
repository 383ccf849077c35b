"""Measure the ingest of callbacks into a database: ``python -m benchmarks.fleet ingest --help``.

Bodies are as nodes post them, JSON with vectors in base64, made before the time is taken. Each
member has one callback on its way, as a node has. The database keeps what it gets: use a new one.
"""

import asyncio
import json
import os
import sys
import time
import uuid
from typing import Annotated

import numpy as np
import typer

from proofserve.fleet.callback_bodies import read
from proofserve.fleet.records import FleetRound, Lane, MemberSource
from proofserve.fleet.sql.store import FleetStore
from proofserve.protocol.codec import encode
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.schemes import scheme
from proofserve.rounds.records import RoundSpec, Workload
from proofserve.rounds.state import Move

_WIDTH = 12


def bodies(opened: FleetRound, lane: Lane, callbacks: int, artifacts: int) -> list[bytes]:
    """The callbacks of one member, in the order of its lane."""
    random = np.random.default_rng(lane.lane)
    numbers = opened.nonces_of(lane.lane)
    made = []
    for callback in range(callbacks):
        nonces = numbers.batch(callback * artifacts, artifacts)
        texts = encode(random.normal(size=(artifacts, _WIDTH)).astype(np.float32))
        body = {
            "public_key": "key",
            "block_hash": "block",
            "block_height": 1,
            "node_id": 0,
            "artifacts": [
                {"nonce": nonce, "vector_b64": text}
                for nonce, text in zip(nonces, texts, strict=True)
            ],
            "encoding": {"dtype": "f16", "k_dim": _WIDTH, "endian": "le"},
        }
        made.append(json.dumps(body, separators=(",", ":")).encode())
    return made


async def post_all(store: FleetStore, opened: FleetRound, lane: Lane, made: list[bytes]) -> None:
    for number, body in enumerate(made):
        found = await asyncio.to_thread(read, body, opened, lane.lane)
        await store.ingest(opened, lane, f"key-{number}", found)


async def measure(database: str, members: int, callbacks: int, artifacts: int) -> None:
    work = Workload(scheme("artifact-v1", k_dim=_WIDTH), Block("block", 1), "key", 256)
    spec = RoundSpec(uuid.uuid4().hex, work, NonceLane(0, 1), 32, None)
    async with await FleetStore.open(database) as store:
        opened = await store.open_round(spec, members)
        ids = []
        for number in range(members):
            member = await store.put_member(f"http://m{number}", f"m{number}", MemberSource.LIST)
            ids.append(member.id)
        given = await store.give_lanes(opened.id, ids)
        lanes = [lane for lane in given if isinstance(lane, Lane)]
        made = [bodies(opened, lane, callbacks, artifacts) for lane in lanes]
        cpu, start = time.process_time(), time.perf_counter()
        await asyncio.gather(
            *(post_all(store, opened, lane, own) for lane, own in zip(lanes, made, strict=True))
        )
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        stored = sum(each.stored for each in (await store.view()).lanes)
        await store.move(Move.STOP)
    total = members * callbacks * artifacts
    if stored != total:
        raise SystemExit(f"{stored} artifacts are stored, {total} were sent")
    sys.stdout.write(
        f"{total} artifacts in {members * callbacks} callbacks of {artifacts} from {members}"
        f" members: {wall_s:.2f} s, {total / wall_s:,.0f} artifacts/s,"
        f" {total / cpu_s:,.0f} for each second of this process\n"
        f"cores that this process may use: {len(os.sched_getaffinity(0))}\n"
    )


def ingest(
    database: Annotated[str, typer.Argument(help="postgresql://... or the path of an SQLite file")],
    members: Annotated[int, typer.Option(min=1, help="members that post at the same time")] = 32,
    callbacks: Annotated[int, typer.Option(min=1, help="callbacks of each member")] = 20,
    artifacts: Annotated[int, typer.Option(min=1, help="artifacts in each callback")] = 1000,
) -> None:
    """Post made-up callbacks into the store, and print the rate."""
    asyncio.run(measure(database, members, callbacks, artifacts))
