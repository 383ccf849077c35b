"""Stored batches: what a member's callback becomes, how it is read, and when it is deleted."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Integer,
    case,
    cast,
    delete,
    exists,
    func,
    insert,
    literal,
    select,
    tuple_,
    update,
)

from proofserve.fleet import callback_bodies
from proofserve.fleet.callback_bodies import check_lane
from proofserve.fleet.records import BatchKind, FleetRound, Lane, MemberFindings, MemberRound
from proofserve.fleet.sql.database import FleetDatabase
from proofserve.fleet.sql.rounds import rounds_where
from proofserve.fleet.sql.tables import (
    AnyRow,
    batches,
    counters,
    deleted_spans,
    deliveries,
    insert_into,
    lanes,
    roots,
    round_about,
    rounds,
)
from proofserve.outbox.database import StorePart, kept, reads, writes
from proofserve.protocol.errors import ProtocolError
from proofserve.rounds.errors import Refusal, Refused
from proofserve.rounds.records import StoredResult, Winner

# As the API's own header allows.
_LONGEST_KEY = 200
_NONCES = np.dtype("<i8")
_HAS_RESULTS = batches.c.last_seq >= batches.c.first_seq
# The most that one step deletes: it takes some milliseconds, and new results may have to wait.
_BATCHES = 200
_CALLBACKS = 100

_Span = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class NewBatch:
    """What is to be stored of ``found``; ``indices`` int64 [n] are those of its nonces in the lane.

    ``counts`` int64 [n] has how many nonces each one stands for: 1, or the size of a root's batch.
    """

    round_number: int
    lane: int
    callback_key: str
    found: MemberFindings
    indices: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def key(self) -> tuple[int, int, str]:
        """What no two stored batches have in common."""
        return self.round_number, self.lane, self.callback_key

    @property
    def nonces(self) -> NDArray[np.int64]:
        return self.found.nonces

    @property
    def ends(self) -> NDArray[np.int64]:
        """The index behind the last nonce of each."""
        return self.indices + self.counts

    def without(self, known: NDArray[np.int64]) -> "NewBatch":
        """This batch without the nonces in ``known``."""
        found, fresh = self.found, ~np.isin(self.nonces, known)
        if fresh.all():
            return self
        body = found.body
        if body is not None:
            roots = [root for root, stays in zip(body["roots"], fresh, strict=True) if stays]
            body = {**body, "roots": roots}
        left = replace(found, nonces=found.nonces[fresh], values=found.values[fresh], body=body)
        return replace(self, found=left, indices=self.indices[fresh], counts=self.counts[fresh])

    def columns(self, number: int, first_seq: int, now: float) -> dict[str, Any]:
        found, size = self.found, len(self.nonces)
        results = 0 if found.kind is BatchKind.ROOTS else size
        return {
            "number": number,
            "round": self.round_number,
            "lane": self.lane,
            "callback_key": self.callback_key,
            "kind": found.kind.value,
            "first_seq": first_seq,
            "last_seq": first_seq + results - 1,
            "count": int(self.counts.sum()),
            "first_index": int(self.indices.min()) if size else None,
            "last_index": int(self.ends.max()) - 1 if size else None,
            "stored_at": now,
            "nonces": found.nonces.astype(_NONCES).tobytes(),
            "row_bytes": found.values.shape[1] * found.values.itemsize,
            "found": found.values.tobytes(),
            "body": None if found.body is None else json.dumps(found.body, separators=(",", ":")),
        }


def new_batch(round_: FleetRound, lane: Lane, callback_key: str, found: MemberFindings) -> NewBatch:
    """Raises ProtocolError for a nonce of another lane, and for a key that cannot be stored."""
    if not (callback_key.isascii() and callback_key.isprintable()):
        raise ProtocolError("Idempotency-Key", "it has characters outside ASCII")
    if not 1 <= len(callback_key) <= _LONGEST_KEY:
        raise ProtocolError("Idempotency-Key", f"it has not 1..{_LONGEST_KEY} characters")
    indices = check_lane(found.nonces, round_.nonces_of(lane.lane), "nonces")
    counts = np.ones_like(indices)
    if found.roots is not None:
        counts = np.array([each.count for each in found.roots.roots], np.int64)
    return NewBatch(round_.number, lane.lane, callback_key, found, indices, counts)


def add_roots(connection: Connection, batch: NewBatch) -> None:
    """Count the nonces of a callback with roots, in the caller's transaction."""
    found = batch.found.roots
    if found is None or not len(batch.counts):
        return
    key = {"round": batch.round_number, "member_round": kept(found.round_id)}
    numbers = {"group_id": found.lane.group_id, "n_groups": found.lane.n_groups}
    count = int(batch.counts.sum())
    added = insert_into(connection, roots).values(
        **key, **numbers, lane=batch.lane, committed=count
    )
    connection.execute(
        added.on_conflict_do_update(
            index_elements=list(key),
            set_={"committed": roots.c.committed + count},
            where=roots.c.lane == batch.lane,
        )
    )


class BatchStore(StorePart[FleetDatabase]):
    """Reads what was stored, and deletes what was delivered."""

    @reads
    def results(self, connection: Connection, after: int, limit: int) -> list[StoredResult]:
        """The first ``limit`` results with a seq above ``after``. No smaller seq appears later."""
        if limit <= 0:
            return []
        seqs = (batches.c.first_seq, batches.c.last_seq)
        chosen = select(batches.c.number, *seqs).where(batches.c.last_seq > after, _HAS_RESULTS)
        # Each of them has at least one result.
        rows = connection.execute(chosen.order_by(batches.c.last_seq).limit(limit))
        sizes = ((row.number, row.last_seq - max(row.first_seq - 1, after)) for row in rows)
        slices = connection.execute(_slices(_enough(sizes, limit), after, limit))
        return [result for row in slices for result in _results(row)][:limit]

    @reads
    def winners(self, connection: Connection, round_id: str, limit: int) -> list[Winner]:
        """The newest ``limit`` winners of a round, oldest first; empty for any other round."""
        if limit <= 0:
            return []
        winning = (batches.c.kind == BatchKind.WINNERS.value) & (batches.c.count > 0)
        chosen = (
            select(batches.c.number, batches.c.count)
            .join(rounds, rounds.c.number == batches.c.round)
            .where(rounds.c.id == round_id, winning)
            .order_by(batches.c.number.desc())
            .limit(limit)
        )
        numbers = _enough((tuple(row) for row in connection.execute(chosen)), limit)
        of_them = select(batches.c.nonces, batches.c.found).where(batches.c.number.in_(numbers))
        found = [
            Winner(nonce, distance)
            for row in connection.execute(of_them.order_by(batches.c.number))
            for nonce, distance in zip(integers(row.nonces), floats(row.found), strict=True)
        ]
        return found[-limit:]

    @reads
    def committed_round(
        self, connection: Connection, block_hash: str, public_key: str, round_id: str | None
    ) -> MemberRound:
        """As ``PublishedResults``: the round of a member, whose callback with roots names it."""
        about = f"block {block_hash!r} and key {public_key!r}"
        of_block = rounds_where(connection, rounds.c.about == round_about(block_hash, public_key))
        if not of_block:
            raise Refused(Refusal.UNKNOWN_ROUND, f"there is no round of {about}")
        committed = [each for each in of_block if each.spec.commits_roots]
        if not committed:
            raise Refused(
                Refusal.NOT_COMMITTED, f"the rounds of {about} publish vectors, not roots"
            )
        found = committed_rounds(connection, committed, round_id)
        if not found:
            text = f"no member has committed to nonces of {about} in round {round_id}"
            raise Refused(Refusal.UNKNOWN_ROUND, text)
        if round_id is None and len(found) > 1:
            ids = ", ".join(each.round_id for each in found[:20])
            raise Refused(Refusal.SEVERAL_ROUNDS, f"give one of these as round_id: {ids}")
        return found[0]

    @writes
    def delete_delivered(self, connection: Connection, older_than_s: float) -> bool:
        """Delete a part of what was delivered so long ago; False if there was nothing to delete.

        Results of a round without a callback URL count as delivered when the round has ended.
        Counts of rounds and lanes stay. A reader of ``results`` sees a gap then; no seq is used
        again. The places that deleted nonces had in their lanes are kept as a few spans, so that a
        callback that a member repeats late is still known.
        """
        before = self.clock() - older_than_s
        about = (deliveries.c.id, deliveries.c.round)
        delivered = (
            select(*about, deliveries.c.first_batch, deliveries.c.last_batch)
            .where(deliveries.c.state == "done", deliveries.c.delivered_at < before)
            .order_by(deliveries.c.delivered_at)
            .limit(_CALLBACKS)
        )
        if rows := connection.execute(delivered).all():
            _delete_callbacks(connection, rows)
            return True
        # A callback could still need the batches of a round that is not cut, or not delivered.
        ended = select(rounds.c.number).where(
            rounds.c.ended_at < before,
            rounds.c.url.is_(None) | (rounds.c.last_batch <= rounds.c.cut_batch),
            ~exists().where(deliveries.c.round == rounds.c.number),
        )
        old = batches.c.round.in_(ended) & (batches.c.stored_at < before)
        return _delete_batches(connection, old, _BATCHES) > 0


def committed_rounds(
    connection: Connection, of: Sequence[FleetRound], round_id: str | None
) -> list[MemberRound]:
    """The members' rounds with roots, of the fleet's rounds ``of``; with an id only that."""
    by_number = {each.number: each for each in of}
    on_lane = (lanes.c.round == roots.c.round) & (lanes.c.lane == roots.c.lane)
    chosen = (
        select(roots, lanes.c.member)
        .join(lanes, on_lane)
        .where(roots.c.round.in_(by_number))
        .order_by(roots.c.round, roots.c.lane, roots.c.group_id)
    )
    if round_id is not None:
        chosen = chosen.where(roots.c.member_round == kept(round_id))
    found = []
    for row in connection.execute(chosen):
        of_round = by_number[row.round]
        own = of_round.nonces_of(row.lane)
        part = replace(own, group_id=row.group_id, n_groups=row.n_groups)
        found.append(MemberRound(row.member_round, part, row.committed, row.member, of_round))
    return found


def vectors(found: bytes, row_bytes: int) -> NDArray[np.float16]:
    """The stored vectors float16 [n, width]."""
    return np.frombuffer(found, "<f2").reshape(-1, row_bytes // 2)


def floats(found: bytes) -> list[float]:
    """The stored distances."""
    values: list[float] = np.frombuffer(found, "<f8").tolist()
    return values


def integers(stored: bytes) -> list[int]:
    """The stored nonces."""
    values: list[int] = np.frombuffer(stored, _NONCES).tolist()
    return values


def _enough(sizes: Iterable[tuple[int, int]], most: int) -> list[int]:
    """The numbers of the first batches that together have ``most`` results, by their sizes."""
    numbers, results = [], 0
    for number, size in sizes:
        numbers.append(number)
        results += size
        if results >= most:
            break
    return numbers


def _slices(numbers: list[int], seq: int, limit: int) -> Any:
    """Of each batch only the results above ``seq``, and of these the first ``limit``."""
    skipped = case(
        (batches.c.first_seq <= seq, literal(seq + 1, BigInteger) - batches.c.first_seq), else_=0
    )

    def part(column: Any, row_bytes: Any) -> Any:
        start, length = cast(skipped * row_bytes + 1, Integer), cast(limit * row_bytes, Integer)
        return func.substr(column, start, length, type_=column.type)

    return (
        select(
            rounds.c.id,
            batches.c.kind,
            batches.c.row_bytes,
            (batches.c.first_seq + skipped).label("seq"),
            part(batches.c.nonces, literal(_NONCES.itemsize)).label("nonces"),
            part(batches.c.found, batches.c.row_bytes).label("found"),
        )
        .join(rounds, rounds.c.number == batches.c.round)
        .where(batches.c.number.in_(numbers))
        .order_by(batches.c.first_seq)
    )


def _results(row: AnyRow) -> list[StoredResult]:
    nonces = integers(row.nonces)
    places = range(row.seq, row.seq + len(nonces))
    if row.kind == BatchKind.WINNERS.value:
        return [
            StoredResult(seq, row.id, nonce, distance=distance)
            for seq, nonce, distance in zip(places, nonces, floats(row.found), strict=True)
        ]
    texts = callback_bodies.encode_all(vectors(row.found, row.row_bytes))
    return [
        StoredResult(seq, row.id, nonce, value)
        for seq, nonce, value in zip(places, nonces, texts, strict=True)
    ]


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
