"""What the sender does next, by the database and the present time."""

import sqlite3
from dataclasses import asdict, dataclass, replace

from proofserve.outbox import deliveries
from proofserve.outbox.committed import batches
from proofserve.outbox.deliveries import Delivery, Span

# A wait longer than its pause and this means that the clock was set back after the due time was
# stored; the callback is then due at once. Seconds.
_CLOCK_SLACK = 1.0

_UNCUT = """
    SELECT number, url, closed OR r_target IS NOT NULL, cut_seq, last_seq, interval_from,
           commits_roots
    FROM rounds
    WHERE url IS NOT NULL AND last_seq > cut_seq AND NOT EXISTS (
        SELECT 1 FROM deliveries WHERE state = 'pending' AND round = rounds.number AND NOT revived)
"""
# The plus keeps SQLite from using the index by nonce, with which it would read the whole round.
_NTH_VALUE = """
    SELECT seq FROM results WHERE +round = ? AND seq BETWEEN ? AND ? AND value IS NOT NULL
    ORDER BY seq LIMIT 1 OFFSET ?
"""
# Keeps the power of two within the range of a float; the longest pause is reached much earlier.
_LAST_DOUBLING = 32


@dataclass(frozen=True, slots=True)
class CallbackPolicy:
    """The limits and times of callbacks. Times in seconds.

    A round's first callback is made ``interval_s`` after its first result, later ones at most once
    in each ``interval_s``, of at most ``max_artifacts`` or as many roots. A callback that failed
    ``max_retries`` times expires; with 0 it never expires. A target must answer within
    ``timeout_s``. The pause after a failure doubles from ``backoff_first_s`` to
    ``backoff_longest_s``. At least every ``look_again_s`` the sender reads the file again: another
    process may have made callbacks due.

    Raises ValueError for a number outside its range.
    """

    interval_s: float = 5.0
    max_artifacts: int = 1_000_000
    max_retries: int = 10
    max_concurrent: int = 10
    timeout_s: float = 10.0
    backoff_first_s: float = 1.0
    backoff_longest_s: float = 30.0
    look_again_s: float = 5.0

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            if not (value > 0 or (value == 0 and field in {"interval_s", "max_retries"})):
                raise ValueError(f"{field} is {value}, which is too small")

    def pause_s(self, failures: int) -> float:
        """The pause after failure number ``failures`` = 1, 2, ... in a row."""
        doublings = min(failures - 1, _LAST_DOUBLING)
        return min(self.backoff_first_s * 2.0**doublings, self.backoff_longest_s)

    def expires(self, failures: int) -> bool:
        return 0 < self.max_retries <= failures


@dataclass(frozen=True, slots=True)
class SendPlan:
    """``due`` has the callbacks to post now, at most one for each target.

    ``wait_s`` is the time until more are due, None if unknown. ``idle``: nothing is undelivered.
    """

    due: tuple[Delivery, ...]
    wait_s: float | None
    idle: bool


def plan(
    connection: sqlite3.Connection,
    policy: CallbackPolicy,
    busy: frozenset[str],
    flushing: bool,
    now: float,
) -> SendPlan:
    """Make the callbacks of rounds that are due, and choose which to post.

    Posts to ``busy`` targets are in flight; ``flushing`` makes every result due at once.
    """
    waits = _cut_rounds(connection, policy, flushing, now)
    undelivered = bool(waits)
    due: list[Delivery] = []
    slots = policy.max_concurrent - len(busy)
    for url, at in deliveries.targets(connection):
        undelivered = True
        if url in busy:
            continue
        wait_s = wait_until(at, now, policy.backoff_longest_s)
        if wait_s > 0.0:
            waits.append(wait_s)
        elif len(due) < slots:
            # Without a free slot no wait is needed: the end of a post leads to a new plan.
            due.append(deliveries.first_of(connection, url))
    return SendPlan(tuple(due), min(waits, default=None), idle=not undelivered)


def _cut_rounds(
    connection: sqlite3.Connection, policy: CallbackPolicy, flushing: bool, now: float
) -> list[float]:
    """Make callbacks of due results. Returns the waits of the rounds that are not due yet.

    Winners are due at once (A.8): a callback holds those of one batch, or of all batches that were
    stored while the previous callback was pending.
    """
    waits = []
    # All rows first: the loop changes the table.
    rounds = connection.execute(_UNCUT).fetchall()
    for number, url, at_once, cut_seq, last_seq, since, commits_roots in rounds:
        wait_s = wait_until(since + policy.interval_s, now, policy.interval_s)
        if wait_s > 0.0 and not at_once and not flushing:
            waits.append(wait_s)
            continue
        cut = _next_span_of_roots if commits_roots else _next_span
        span = cut(connection, Span(number, cut_seq + 1, last_seq), policy.max_artifacts)
        if span is not None:
            deliveries.add_span(connection, url, span, now)
        connection.execute(
            "UPDATE rounds SET cut_seq = ?, interval_from = ? WHERE number = ?",
            (last_seq if span is None else span.last_seq, now, number),
        )
    return waits


def _next_span(connection: sqlite3.Connection, uncut: Span, most: int) -> Span | None:
    """The first ``most`` values of ``uncut``; None if it has only failures."""
    place = (uncut.round_number, uncut.first_seq, uncut.last_seq)
    first = connection.execute(_NTH_VALUE, (*place, 0)).fetchone()
    if first is None:
        return None
    last = connection.execute(_NTH_VALUE, (*place, most - 1)).fetchone()
    return Span(uncut.round_number, first[0], uncut.last_seq if last is None else last[0])


def _next_span_of_roots(connection: sqlite3.Connection, uncut: Span, most: int) -> Span | None:
    """The first ``most`` batches of ``uncut``, which always holds whole batches."""
    seqs = (uncut.first_seq, uncut.last_seq)
    last = batches.nth_end(connection, uncut.round_number, seqs, most - 1)
    return uncut if last is None else replace(uncut, last_seq=last)


def wait_until(at: float, now: float, longest_s: float) -> float:
    """The seconds until ``at``; 0 also if they are more than the clock can explain."""
    wait_s = at - now
    return 0.0 if wait_s <= 0.0 or wait_s > longest_s + _CLOCK_SLACK else wait_s
