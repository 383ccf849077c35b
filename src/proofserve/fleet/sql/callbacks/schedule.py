"""What the sender does next. It runs inside a transaction of the caller.

As in a node's outbox, one callback holds all that came during an interval, or while the callback
before it was not delivered: a callback for each one of a member would be too many for one stream.
"""

from sqlalchemy import Connection, exists, select, update

from proofserve.fleet.sql import spec_json
from proofserve.fleet.sql.callbacks import deliveries
from proofserve.fleet.sql.tables import batches, rounds
from proofserve.fleet.sql.tables import deliveries as deliveries_table
from proofserve.outbox.callbacks import CallbackPolicy, Delivery, SendPlan, Span, wait_until

# The most batches that one plan looks at in a round; more are left to the next callback.
_MOST_BATCHES = 10_000


def plan(
    connection: Connection, policy: CallbackPolicy, busy: frozenset[str], flushing: bool, now: float
) -> SendPlan:
    """As ``outbox.schedule.plan``."""
    waits = _cut_rounds(connection, policy, flushing, now)
    undelivered = bool(waits)
    due: list[Delivery] = []
    slots = policy.max_concurrent - len(busy)
    for at, delivery in deliveries.firsts(connection):
        undelivered = True
        if delivery.url in busy:
            continue
        wait_s = wait_until(at, now, policy.backoff_longest_s)
        if wait_s > 0.0:
            waits.append(wait_s)
        elif len(due) < slots:
            # Without a free slot no wait is needed: the end of a post leads to a new plan.
            due.append(delivery)
    return SendPlan(tuple(due), min(waits, default=None), idle=not undelivered)


def _cut_rounds(
    connection: Connection, policy: CallbackPolicy, flushing: bool, now: float
) -> list[float]:
    """Make callbacks of due batches. Returns the waits of the rounds that are not due yet."""
    waits = []
    undelivered = exists().where(
        deliveries_table.c.round == rounds.c.number, deliveries_table.c.state == "pending"
    )
    # Locked, because a controller that has just lost the lead may still plan.
    uncut = (
        select(rounds)
        .where(rounds.c.url.is_not(None), rounds.c.last_batch > rounds.c.cut_batch, ~undelivered)
        .order_by(rounds.c.number)
        .with_for_update()
    )
    for row in connection.execute(uncut).all():
        spec = spec_json.loads(row.spec)
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
            deliveries.add_span(connection, row.url, span, now)
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
