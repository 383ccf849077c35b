"""Deletes what was delivered long ago, in small steps. Runs inside transactions of the caller.

Counts of rounds and lanes stay. The places that deleted nonces had in their lanes are kept as a few
spans, so that a callback that a member repeats late is still known.
"""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, delete, exists, insert, select, tuple_, update

from proofserve.fleet.sql.tables import AnyRow, batches, counters, deleted_spans, deliveries, rounds

# The most that one step deletes: it takes some milliseconds, and new results may have to wait.
_BATCHES = 200
_CALLBACKS = 100

_Span = tuple[int, int]


def step(connection: Connection, before: float) -> bool:
    """Delete a part of what was delivered before ``before``, in wall-clock seconds.

    Results of a round without a callback URL count as delivered when the round has ended. Returns
    False if there was nothing to delete.
    """
    delivered = (
        select(
            deliveries.c.id, deliveries.c.round, deliveries.c.first_batch, deliveries.c.last_batch
        )
        .where(deliveries.c.state == "done", deliveries.c.delivered_at < before)
        .order_by(deliveries.c.delivered_at)
        .limit(_CALLBACKS)
    )
    if rows := connection.execute(delivered).all():
        _delete_callbacks(connection, rows)
        return True
    return _delete_batches(connection, _of_ended_rounds(before), _BATCHES) > 0


def _delete_callbacks(connection: Connection, rows: Sequence[AnyRow]) -> None:
    room, done = _BATCHES, []
    for row in rows:
        if row.round is not None:
            of_span = batches.c.number.between(row.first_batch, row.last_batch)
            room -= _delete_batches(connection, (batches.c.round == row.round) & of_span, room)
        if not room:
            # The next step deletes its other batches, if it has more.
            break
        done.append(row.id)
    connection.execute(delete(deliveries).where(deliveries.c.id.in_(done)))
    deleted = counters.c.deleted_callbacks + len(done)
    connection.execute(update(counters).values(deleted_callbacks=deleted))


def _of_ended_rounds(before: float) -> ColumnElement[bool]:
    """Old batches of rounds that ended, without a callback that could still need them."""
    ended = select(rounds.c.number).where(
        rounds.c.ended_at < before,
        rounds.c.url.is_(None) | (rounds.c.last_batch <= rounds.c.cut_batch),
        ~exists().where(deliveries.c.round == rounds.c.number),
    )
    return batches.c.round.in_(ended) & (batches.c.stored_at < before)


def _delete_batches(connection: Connection, chosen: ColumnElement[bool], most: int) -> int:
    """Delete at most ``most`` of the ``chosen`` batches; returns how many."""
    columns = (batches.c.number, batches.c.round, batches.c.lane)
    found = connection.execute(
        select(*columns, batches.c.first_index, batches.c.last_index)
        .where(chosen)
        .order_by(batches.c.number)
        .limit(most)
    ).all()
    if found:
        _keep_spans(connection, [row for row in found if row.first_index is not None])
        numbers = [row.number for row in found]
        connection.execute(delete(batches).where(batches.c.number.in_(numbers)))
    return len(found)


def _keep_spans(connection: Connection, rows: Sequence[AnyRow]) -> None:
    """Add the spans of ``rows`` to those of their lanes, and join those that meet."""
    of_lane: dict[tuple[int, int], list[_Span]] = {}
    for row in rows:
        span = (row.first_index, row.last_index + 1)
        of_lane.setdefault((row.round, row.lane), []).append(span)
    if not of_lane:
        return
    chosen = tuple_(deleted_spans.c.round, deleted_spans.c.lane).in_(of_lane)
    for number, lane, first, end in connection.execute(select(deleted_spans).where(chosen)):
        of_lane[number, lane].append((first, end))
    connection.execute(delete(deleted_spans).where(chosen))
    joined = [
        {"round": number, "lane": lane, "first_index": first, "end_index": end}
        for (number, lane), spans in of_lane.items()
        for first, end in _joined(spans)
    ]
    connection.execute(insert(deleted_spans), joined)


def _joined(spans: Sequence[_Span]) -> list[_Span]:
    found: list[_Span] = []
    for first, end in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((first, end))
    return found
