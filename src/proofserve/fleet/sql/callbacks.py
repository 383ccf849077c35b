"""Callbacks from the fleet to the network: what is cut from stored batches, and bodies.

As in a node's outbox, one callback holds all that came during an interval, or while the callback
before it was not delivered: a callback for each one of a member would be too many for one stream.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, exists, func, select, text

from proofserve.fleet import callback_bodies
from proofserve.fleet.sql.batches import floats, integers, vectors
from proofserve.fleet.sql.database import FleetDatabase
from proofserve.fleet.sql.tables import PREFIX, AnyRow, batches, deliveries, read_spec, rounds
from proofserve.outbox.planning import (
    CallbackStore,
    Delivery,
    Span,
    UncutRound,
    listed,
    listed_artifacts,
)
from proofserve.rounds.records import RoundSpec
from proofserve.wire.records import DISTANCE

# The most batches that one plan looks at in a round; more are left to the next callback.
_MOST_BATCHES = 10_000
# Batches in one transaction, so that on SQLite new results need not wait for a large body.
_PAGE = 16
# The row of the URL is locked until the commit.
_NEXT_SEQUENCE = """
    INSERT INTO {t}streams (url, last) VALUES (:url, 1)
    ON CONFLICT (url) DO UPDATE SET last = {t}streams.last + 1 RETURNING last
"""
_PENDING = deliveries.c.state == "pending"


class DeliveryStore(CallbackStore[FleetDatabase, Connection]):
    """Callbacks of whole batches. Those to one URL are posted in the order of their sequence."""

    prefix, unit = PREFIX, "batch"
    next_sequence, deleted = _NEXT_SEQUENCE, "SELECT deleted_callbacks, 0 FROM {t}counters"

    @staticmethod
    def _execute(connection: Connection, sql: str, values: Mapping[str, Any]) -> Any:
        return connection.execute(text(sql), values)

    def _uncut(self, connection: Connection) -> Sequence[UncutRound]:
        undelivered = exists().where(deliveries.c.round == rounds.c.number, _PENDING)
        # Locked, because a controller that has just lost the lead may still plan.
        uncut = (
            select(rounds)
            .where(
                rounds.c.url.is_not(None), rounds.c.last_batch > rounds.c.cut_batch, ~undelivered
            )
            .order_by(rounds.c.number)
            .with_for_update()
        )
        found = []
        for row in connection.execute(uncut):
            spec = read_spec(row.spec)
            at_once = row.ended_at is not None or spec.target is not None
            span = Span(row.number, row.cut_batch + 1, row.last_batch)
            found.append(UncutRound(span, row.url, at_once, row.interval_from, spec.commits_roots))
        return found

    def _spans(self, connection: Connection, of: UncutRound, most: int) -> Sequence[Span]:
        if of.commits_roots:
            # Roots name the lane of one member, so each of its callbacks goes on as it is.
            return _spans(connection, of.span, 1)
        return _spans(connection, of.span, most)[:1]

    def _firsts(self, connection: Connection) -> Iterable[tuple[float, Delivery]]:
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
        for row in connection.execute(chosen):
            span = Span(row.round, row.first_batch, row.last_batch) if row.body is None else None
            known = (row.id, row.endpoint, row.url, row.idempotency_key, row.sequence, row.attempts)
            yield row.next_attempt_at, Delivery(*known, span, row.round_id)

    def _stored_body(self, connection: Connection, delivery: Delivery) -> str | None:
        if delivery.span is None:
            return super()._stored_body(connection, delivery)
        # The one batch of a callback with roots goes on as it came.
        of_first = select(batches.c.body).where(batches.c.number == delivery.span.first_seq)
        body: str | None = connection.execute(of_first).scalar_one()
        return body

    def _spec(self, connection: Connection, round_number: int) -> RoundSpec:
        chosen = select(rounds.c.spec).where(rounds.c.number == round_number)
        return read_spec(connection.execute(chosen).scalar_one())

    def _page(
        self,
        connection: Connection,
        span: Span,
        kind: str,  # noqa: ARG002 - bodies with roots are stored
        after: int,
    ) -> Sequence[AnyRow]:
        """The next batches with something new."""
        columns = (batches.c.number, batches.c.nonces, batches.c.found, batches.c.row_bytes)
        chosen = select(*columns).where(
            batches.c.round == span.round_number,
            batches.c.number > after,
            batches.c.number <= span.last_seq,
            batches.c.count > 0,
        )
        return connection.execute(chosen.order_by(batches.c.number).limit(_PAGE)).all()

    @staticmethod
    def _lists(rows: Sequence[AnyRow], kind: str) -> Mapping[str, str]:
        nonces = [nonce for row in rows for nonce in integers(row.nonces)]
        if kind == DISTANCE:
            distances = [distance for row in rows for distance in floats(row.found)]
            return {"nonces": listed(nonces), "dist": listed(distances)}
        found = vectors(b"".join(row.found for row in rows), rows[0].row_bytes)
        texts = callback_bodies.encode_all(found)
        return {"artifacts": listed_artifacts(zip(nonces, texts, strict=True))}


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
