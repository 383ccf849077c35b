"""Callbacks to the network as rows. Every function runs inside a transaction of the caller."""

import uuid
from typing import Any

from sqlalchemy import Connection, func, select, update

from proofserve.fleet.sql.dialects import insert_into
from proofserve.fleet.sql.tables import AnyRow, batches, counters, deliveries, rounds, streams
from proofserve.fleet.sql.texts import kept
from proofserve.outbox.callbacks import Delivery, Span
from proofserve.rounds.status import OutboxGauges
from proofserve.wire.paths import GENERATED

_PENDING = deliveries.c.state == "pending"


def add_body(connection: Connection, endpoint: str, url: str, body: str, now: float) -> None:
    """Queue a callback with this body, due at once."""
    _add(connection, endpoint, url, now, body=body)


def add_span(connection: Connection, url: str, span: Span, now: float) -> None:
    """Queue a callback about the batches ``first_seq`` .. ``last_seq`` of a round."""
    about = {"round": span.round_number, "first_batch": span.first_seq, "last_batch": span.last_seq}
    _add(connection, GENERATED, url, now, **about)


def firsts(connection: Connection) -> list[tuple[float, Delivery]]:
    """The next callback of each URL, by its time, and when it is due.

    A URL's callbacks go out in the order of their sequence: a later one waits for an earlier one.
    """
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
    return [(row.next_attempt_at, _delivery(row)) for row in connection.execute(chosen)]


def acknowledge(connection: Connection, delivery: Delivery, now: float) -> None:
    settled = update(deliveries).where(deliveries.c.id == delivery.id, _PENDING)
    connection.execute(
        settled.values(state="done", delivered_at=now, attempts=deliveries.c.attempts + 1)
    )


def fail(
    connection: Connection, delivery: Delivery, error: str, pause_s: float | None, now: float
) -> None:
    """Count a failure. The next attempt is due after ``pause_s`` seconds, None for never."""
    settled = update(deliveries).where(deliveries.c.id == delivery.id, _PENDING)
    connection.execute(
        settled.values(
            attempts=deliveries.c.attempts + 1,
            last_error=kept(error),
            failed_at=now,
            state="expired" if pause_s is None else "pending",
            next_attempt_at=now + (pause_s or 0.0),
        )
    )


def gauges(connection: Connection, now: float) -> OutboxGauges:
    states = select(deliveries.c.state, func.count()).group_by(deliveries.c.state)
    counts = {row[0]: row[1] for row in connection.execute(states)}
    deleted = connection.execute(select(counters.c.deleted_callbacks)).scalar_one()
    oldest = connection.execute(select(func.min(deliveries.c.created_at)).where(_PENDING)).scalar()
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
        oldest_pending_s=0.0 if oldest is None else max(0.0, now - oldest),
        last_error=last_error,
    )


def stored_body(connection: Connection, delivery: Delivery) -> str:
    chosen = select(deliveries.c.body).where(deliveries.c.id == delivery.id)
    body: str = connection.execute(chosen).scalar_one()
    return body


def batch_page(connection: Connection, span: Span, after: int, limit: int) -> list[AnyRow]:
    """The next ``limit`` batches of ``span`` with something new, behind batch number ``after``."""
    columns = (batches.c.number, batches.c.nonces, batches.c.found, batches.c.row_bytes)
    chosen = select(*columns, batches.c.body).where(
        batches.c.round == span.round_number,
        batches.c.number > after,
        batches.c.number <= span.last_seq,
        batches.c.count > 0,
    )
    return list(connection.execute(chosen.order_by(batches.c.number).limit(limit)))


def _add(connection: Connection, endpoint: str, url: str, now: float, **about: Any) -> None:
    # A URL with and without a slash at its end has one sequence.
    url = url.rstrip("/")
    known = {"endpoint": endpoint, "url": url, "created_at": now, "next_attempt_at": now}
    sequence = _next_sequence(connection, url)
    numbers = {"sequence": sequence, "idempotency_key": uuid.uuid4().hex}
    connection.execute(deliveries.insert().values(**known, **numbers, **about))


def _next_sequence(connection: Connection, url: str) -> int:
    """Numbers of a URL rise in the order of commits: its row is locked until then."""
    insert = insert_into(connection, streams).values(url=url, last=1)
    counted = insert.on_conflict_do_update(
        index_elements=[streams.c.url], set_={"last": streams.c.last + 1}
    )
    return int(connection.execute(counted.returning(streams.c.last)).scalar_one())


def _delivery(row: AnyRow) -> Delivery:
    of_round = row.body is None
    return Delivery(
        id=row.id,
        endpoint=row.endpoint,
        url=row.url,
        key=row.idempotency_key,
        sequence=row.sequence,
        attempts=row.attempts,
        span=Span(row.round, row.first_batch, row.last_batch) if of_round else None,
        round_id=row.round_id,
    )
