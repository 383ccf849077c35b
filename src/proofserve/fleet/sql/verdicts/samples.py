"""Draws the nonces of a job from a lane's stored batches, inside a transaction of the caller."""

import json
from collections import defaultdict

import numpy as np
from sqlalchemy import ColumnElement, Connection, select

from proofserve.fleet.records import BatchKind
from proofserve.fleet.sql.batches.results import integers, vectors
from proofserve.fleet.sql.tables import AnyRow, batches
from proofserve.fleet.verification_records import StoredSample, VerificationJob
from proofserve.protocol.nonces import draw


def of_job(connection: Connection, job: VerificationJob) -> StoredSample:
    """The artifacts of a job, the same ones each time."""
    rows = _batches(connection, job)
    ends = np.cumsum([row.size for row in rows], dtype=np.int64)
    total = int(ends[-1]) if rows else 0
    if rows and rows[0].kind == BatchKind.ROOTS.value:
        return _committed(connection, job, total)
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place in draw(range(total), job.seed, job.rule.nonces):
        batch = int(np.searchsorted(ends, place, side="right"))
        places[rows[batch].number].append(place - int(ends[batch]) + rows[batch].size)
    nonces: list[int] = []
    found = []
    for number, own in sorted(places.items()):
        columns = (batches.c.nonces, batches.c.found, batches.c.row_bytes)
        row = connection.execute(select(*columns).where(batches.c.number == number)).one()
        stored = integers(row.nonces)
        nonces += [stored[place] for place in own]
        found.append(vectors(row.found, row.row_bytes)[own])
    drawn = np.concatenate(found) if found else np.empty((0, 0), np.float16)
    return StoredSample(np.array(nonces, np.int64), drawn, total)


def _batches(connection: Connection, job: VerificationJob) -> list[AnyRow]:
    chosen = select(batches.c.number, batches.c.count.label("size"), batches.c.kind).where(
        *_of(job)
    )
    return list(connection.execute(chosen.order_by(batches.c.number)))


def _committed(connection: Connection, job: VerificationJob, total: int) -> StoredSample:
    chosen = select(batches.c.body).where(*_of(job)).order_by(batches.c.number)
    bodies = tuple(json.loads(body) for body in connection.execute(chosen).scalars())
    nothing = np.empty((0, 0), np.float16)
    return StoredSample(np.empty(0, np.int64), nothing, total, BatchKind.ROOTS, bodies)


def _of(job: VerificationJob) -> tuple[ColumnElement[bool], ...]:
    return (
        batches.c.round == job.round_number,
        batches.c.lane == job.lane,
        batches.c.number > job.after_batch,
        batches.c.number <= job.through_batch,
        batches.c.count > 0,
    )
