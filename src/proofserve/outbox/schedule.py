"""What the sender does next: a step over the database, at a given moment."""

import sqlite3
from dataclasses import asdict, dataclass

from proofserve.outbox import deliveries
from proofserve.outbox.deliveries import Delivery, Span

# A due time further away than its own pause, plus this, was stored by a clock that has since been
# set back; it counts as due rather than as a wait of hours. Seconds.
_CLOCK_SLACK = 1.0

_UNCUT = """
    SELECT number, url, closed OR r_target IS NOT NULL, cut_seq, last_seq, interval_from
    FROM rounds
    WHERE url IS NOT NULL AND last_seq > cut_seq AND NOT EXISTS (
        SELECT 1 FROM deliveries WHERE state = 'pending' AND round = rounds.number AND NOT revived)
"""
# The plus keeps SQLite off the index by nonce, which would walk through the whole round each time.
_NTH_VALUE = """
    SELECT seq FROM results WHERE +round = ? AND seq BETWEEN ? AND ? AND value IS NOT NULL
    ORDER BY seq LIMIT 1 OFFSET ?
"""
# Far beyond the longest pause already; keeps the power of two a float for ever.
_LAST_DOUBLING = 32


@dataclass(frozen=True, slots=True)
class CallbackPolicy:
    """The sender's numbers. Times in seconds.

    A round's first delivery is cut ``interval_s`` after its first result and at most one each
    ``interval_s`` from then on, of at most ``max_artifacts``. A delivery that failed
    ``max_retries`` times expires; 0 keeps trying for ever. ``timeout_s`` is what a target has to
    answer. The pause after a failure doubles from ``backoff_first_s`` to ``backoff_longest_s``.
    At least every ``look_again_s`` the sender reads the file again: another process may have made
    callbacks due.

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
    """``due`` is to be posted now, at most one for each target.

    ``wait_s`` is how long until more is due, None while nothing is foreseen. ``idle`` says that
    nothing is undelivered.
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
    """Cut the round deliveries that are due and choose what to post.

    ``busy`` targets are being posted to; ``flushing`` makes every result due at once.
    """
    waits = _cut_rounds(connection, policy, flushing, now)
    undelivered = bool(waits)
    due: list[Delivery] = []
    slots = policy.max_concurrent - len(busy)
    for url, at in deliveries.targets(connection):
        undelivered = True
        if url in busy:
            continue
        wait_s = _until(at, now, policy.backoff_longest_s)
        if wait_s > 0.0:
            waits.append(wait_s)
        elif len(due) < slots:
            # A target beyond the slots needs no wait: a post that ends asks for a new plan.
            due.append(deliveries.first_of(connection, url))
    return SendPlan(tuple(due), min(waits, default=None), idle=not undelivered)


def _cut_rounds(
    connection: sqlite3.Connection, policy: CallbackPolicy, flushing: bool, now: float
) -> list[float]:
    """Turn due results into deliveries; the waits of the rounds that are not due yet.

    Winners are due at once (A.8), so a delivery holds those of one batch, or of all batches that
    came while its target was behind.
    """
    waits = []
    # All rows first: the loop changes the table.
    for number, url, at_once, cut_seq, last_seq, since in connection.execute(_UNCUT).fetchall():
        wait_s = _until(since + policy.interval_s, now, policy.interval_s)
        if wait_s > 0.0 and not at_once and not flushing:
            waits.append(wait_s)
            continue
        span = _next_span(connection, Span(number, cut_seq + 1, last_seq), policy.max_artifacts)
        if span is not None:
            deliveries.add_span(connection, url, span, now)
        connection.execute(
            "UPDATE rounds SET cut_seq = ?, interval_from = ? WHERE number = ?",
            (last_seq if span is None else span.last_seq, now, number),
        )
    return waits


def _next_span(connection: sqlite3.Connection, uncut: Span, most: int) -> Span | None:
    """The oldest part of ``uncut`` with at most ``most`` values, None if it only has failures."""
    place = (uncut.round_number, uncut.first_seq, uncut.last_seq)
    first = connection.execute(_NTH_VALUE, (*place, 0)).fetchone()
    if first is None:
        return None
    last = connection.execute(_NTH_VALUE, (*place, most - 1)).fetchone()
    return Span(uncut.round_number, first[0], uncut.last_seq if last is None else last[0])


def _until(at: float, now: float, longest_s: float) -> float:
    wait_s = at - now
    return 0.0 if wait_s <= 0.0 or wait_s > longest_s + _CLOCK_SLACK else wait_s
