"""Callbacks from the fleet to the network: what goes out next, each as a row, and its body.

As in a node's outbox, one callback holds all that came during an interval, or while the callback
before it was not delivered: a callback for each one of a member would be too many for one stream.
"""

import asyncio
import uuid
from typing import Any

from sqlalchemy import Connection, exists, func, select, update

from proofserve.fleet import callback_bodies
from proofserve.fleet.sql.batches import floats, integers, vectors
from proofserve.fleet.sql.database import FleetDatabase
from proofserve.fleet.sql.rounds import rounds_where
from proofserve.fleet.sql.tables import (
    AnyRow,
    batches,
    counters,
    deliveries,
    insert_into,
    kept,
    read_spec,
    rounds,
    streams,
)
from proofserve.outbox.database import StorePart, announces, reads, writes
from proofserve.outbox.planning import (
    CallbackPolicy,
    Delivery,
    SendPlan,
    Span,
    callback_text,
    joined,
    listed,
    send_plan,
    wait_until,
)
from proofserve.rounds.records import CompletedJob, DistanceVerdict, RoundSpec
from proofserve.rounds.status import OutboxGauges
from proofserve.wire import GENERATED
from proofserve.wire.callbacks import callback
from proofserve.wire.records import encoding_of

# The most batches that one plan looks at in a round; more are left to the next callback.
_MOST_BATCHES = 10_000
# Batches in one transaction, so that on SQLite new results need not wait for a large body.
_PAGE = 16
_PENDING = deliveries.c.state == "pending"


class DeliveryStore(StorePart[FleetDatabase]):
    """What ``outbox.sender.CallbackSender`` needs, and the callbacks that others queue."""

    _failed_attempts = 0

    @announces
    def push(self, connection: Connection, url: str, about: DistanceVerdict) -> None:
        """Queue the callback about a verdict to ``url``."""
        queue_callback(connection, url, about, self.clock())

    @writes
    def plan(
        self,
        connection: Connection,
        policy: CallbackPolicy,
        busy: frozenset[str] = frozenset(),
        flushing: bool = False,
    ) -> SendPlan:
        """The callbacks to post now, at most one for each URL, in the order of their sequence."""
        now = self.clock()
        uncut = _cut_rounds(connection, policy, flushing, now)
        first = {delivery.url: (at, delivery) for at, delivery in _firsts(connection)}
        targets = ((url, at) for url, (at, _) in first.items())
        return send_plan(targets, lambda url: first[url][1], uncut, policy, busy, now)

    async def body(self, delivery: Delivery) -> bytes:
        """The body (protocol A.8, B.7), read in pieces."""
        if delivery.span is None or delivery.round_id is None:
            chosen = select(deliveries.c.body).where(deliveries.c.id == delivery.id)
            text: str = await self.database.read(lambda c: c.execute(chosen).scalar_one())
            return text.encode()
        of_id = rounds.c.id == delivery.round_id
        (spec,) = (each.spec for each in await self.database.read(rounds_where, of_id))
        pages, after = [], delivery.span.first_seq - 1
        while rows := await self.database.read(_batch_page, delivery.span, after):
            if spec.commits_roots:
                # The one batch of such a callback goes on as it came.
                return str(rows[0].body).encode()
            after = rows[-1].number
            pages.append(await asyncio.to_thread(_lists, rows, spec))
        return await asyncio.to_thread(_joined_body, spec, pages)

    @writes
    def acknowledge(self, connection: Connection, delivery: Delivery) -> None:
        _settle(connection, delivery, state="done", delivered_at=self.clock())

    async def fail(self, delivery: Delivery, error: str, pause_s: float | None) -> None:
        """Count a failed attempt; the next is due after ``pause_s``; None makes it expire."""
        now, state = self.clock(), "expired" if pause_s is None else "pending"
        again = {"failed_at": now, "next_attempt_at": now + (pause_s or 0.0), "state": state}
        changed = {"last_error": kept(error), **again}
        await self.database.write(lambda c: _settle(c, delivery, **changed))
        self._failed_attempts += 1

    @reads
    def gauges(self, connection: Connection) -> OutboxGauges:
        states = select(deliveries.c.state, func.count()).group_by(deliveries.c.state)
        counts = {row[0]: row[1] for row in connection.execute(states)}
        deleted = connection.execute(select(counters.c.deleted_callbacks)).scalar_one()
        created = select(func.min(deliveries.c.created_at)).where(_PENDING)
        oldest = connection.execute(created).scalar()
        last_error = connection.execute(
            select(deliveries.c.last_error)
            .where(deliveries.c.state != "done", deliveries.c.failed_at.is_not(None))
            .order_by(deliveries.c.failed_at.desc(), deliveries.c.id.desc())
            .limit(1)
        ).scalar()
        return OutboxGauges(
            # Sums are decimals in PostgreSQL.
            results=int(connection.execute(select(func.sum(rounds.c.stored))).scalar() or 0),
            pending=counts.get("pending", 0),
            delivered=counts.get("done", 0) + deleted,
            expired=counts.get("expired", 0),
            failed_attempts=self._failed_attempts,
            oldest_pending_s=0.0 if oldest is None else max(0.0, self.clock() - oldest),
            last_error=last_error,
        )


# The functions below run inside a transaction of the caller.


def queue_callback(
    connection: Connection, url: str, about: CompletedJob | DistanceVerdict, now: float
) -> None:
    endpoint, body = callback(about)
    add_callback(connection, endpoint, url, now, body=callback_text(endpoint, body))


def add_callback(connection: Connection, endpoint: str, url: str, now: float, **about: Any) -> None:
    """Queue a callback, due at once. ``about`` is its ``body``, or a round and its batches."""
    # A URL with and without a slash at its end has one sequence.
    url = url.rstrip("/")
    # Numbers of a URL rise in the order of commits: its row is locked until then.
    first = insert_into(connection, streams).values(url=url, last=1)
    counted = first.on_conflict_do_update(
        index_elements=[streams.c.url], set_={"last": streams.c.last + 1}
    )
    sequence = connection.execute(counted.returning(streams.c.last)).scalar_one()
    known = {"endpoint": endpoint, "url": url, "created_at": now, "next_attempt_at": now}
    numbers = {"sequence": int(sequence), "idempotency_key": uuid.uuid4().hex}
    connection.execute(deliveries.insert().values(**known, **numbers, **about))


def _settle(connection: Connection, delivery: Delivery, **found: Any) -> None:
    """Note how an attempt ended, unless another controller has."""
    pending = update(deliveries).where(deliveries.c.id == delivery.id, _PENDING)
    connection.execute(pending.values(attempts=deliveries.c.attempts + 1, **found))


def _cut_rounds(
    connection: Connection, policy: CallbackPolicy, flushing: bool, now: float
) -> list[float]:
    """Make callbacks of due batches. Returns the waits of the rounds that are not due yet."""
    waits = []
    undelivered = exists().where(deliveries.c.round == rounds.c.number, _PENDING)
    # Locked, because a controller that has just lost the lead may still plan.
    uncut = (
        select(rounds)
        .where(rounds.c.url.is_not(None), rounds.c.last_batch > rounds.c.cut_batch, ~undelivered)
        .order_by(rounds.c.number)
        .with_for_update()
    )
    for row in connection.execute(uncut).all():
        spec = read_spec(row.spec)
        wait_s = wait_until(row.interval_from + policy.interval_s, now, policy.interval_s)
        at_once = row.ended_at is not None or spec.target is not None or flushing
        if wait_s > 0.0 and not at_once:
            waits.append(wait_s)
            continue
        most = 1 if spec.commits_roots else policy.max_artifacts
        spans = _spans(connection, Span(row.number, row.cut_batch + 1, row.last_batch), most)
        # Roots name the lane of one member, so each of its callbacks goes on as it is.
        chosen = spans if spec.commits_roots else spans[:1]
        for span in chosen:
            held = {"first_batch": span.first_seq, "last_batch": span.last_seq}
            add_callback(connection, GENERATED, row.url, now, round=row.number, **held)
        connection.execute(
            update(rounds)
            .where(rounds.c.number == row.number)
            .values(cut_batch=chosen[-1].last_seq, interval_from=now)
        )
    return waits


def _spans(connection: Connection, uncut: Span, most: int) -> list[Span]:
    """``uncut`` in parts of whole batches with at most ``most`` nonces, or with one batch."""
    chosen = (
        select(batches.c.number, batches.c.count)
        .where(
            batches.c.round == uncut.round_number,
            batches.c.number.between(uncut.first_seq, uncut.last_seq),
            batches.c.count > 0,
        )
        .order_by(batches.c.number)
        .limit(_MOST_BATCHES)
    )
    spans: list[Span] = []
    nonces = 0
    for number, count in connection.execute(chosen):
        nonces += count
        if spans and nonces <= most:
            spans[-1] = Span(uncut.round_number, spans[-1].first_seq, number)
        else:
            spans.append(Span(uncut.round_number, number, number))
            nonces = count
    return spans


def _firsts(connection: Connection) -> list[tuple[float, Delivery]]:
    """The next callback of each URL by its sequence, by time, and when it is due."""
    first = (
        select(deliveries.c.url, func.min(deliveries.c.sequence).label("sequence"))
        .where(_PENDING)
        .group_by(deliveries.c.url)
        .subquery()
    )
    of_first = (deliveries.c.url == first.c.url) & (deliveries.c.sequence == first.c.sequence)
    chosen = (
        select(deliveries, rounds.c.id.label("round_id"))
        .join(first, of_first)
        .outerjoin(rounds, rounds.c.number == deliveries.c.round)
        .order_by(deliveries.c.next_attempt_at, deliveries.c.id)
    )
    found = []
    for row in connection.execute(chosen):
        span = Span(row.round, row.first_batch, row.last_batch) if row.body is None else None
        known = (row.id, row.endpoint, row.url, row.idempotency_key, row.sequence, row.attempts)
        found.append((row.next_attempt_at, Delivery(*known, span, row.round_id)))
    return found


def _batch_page(connection: Connection, span: Span, after: int) -> list[AnyRow]:
    """The next batches of ``span`` with something new, behind batch number ``after``."""
    columns = (batches.c.number, batches.c.nonces, batches.c.found, batches.c.row_bytes)
    chosen = select(*columns, batches.c.body).where(
        batches.c.round == span.round_number,
        batches.c.number > after,
        batches.c.number <= span.last_seq,
        batches.c.count > 0,
    )
    return list(connection.execute(chosen.order_by(batches.c.number).limit(_PAGE)))


def _lists(rows: list[AnyRow], spec: RoundSpec) -> dict[str, str]:
    """The lists of the body by name, as JSON without the brackets."""
    nonces = [nonce for row in rows for nonce in integers(row.nonces)]
    if spec.target is not None:
        distances = [distance for row in rows for distance in floats(row.found)]
        return {"nonces": listed(nonces), "dist": listed(distances)}
    found = vectors(b"".join(row.found for row in rows), rows[0].row_bytes)
    pairs = zip(nonces, callback_bodies.encode_all(found), strict=True)
    # By hand: the same as the JSON of artifact_record, in a third of its time.
    return {
        "artifacts": ",".join(f'{{"nonce":{nonce},"vector_b64":"{text}"}}' for nonce, text in pairs)
    }


def _joined_body(spec: RoundSpec, pages: list[dict[str, str]]) -> bytes:
    work = spec.work
    head = {
        "public_key": work.public_key,
        "block_hash": work.block.hash,
        "block_height": work.block.height,
        "node_id": spec.lane.node_id if spec.lane else None,
    }
    if spec.target is not None:
        tail: dict[str, Any] = {"r_target": spec.target.r_target}
    else:
        tail = {"encoding": encoding_of(work.scheme.width)}
    return joined(head, pages, tail)
