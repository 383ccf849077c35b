"""Results of stored batches. Every function runs inside a transaction of the caller."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import BigInteger, Connection, Integer, case, cast, func, literal, select

from proofserve.fleet import vector_texts
from proofserve.fleet.records import BatchKind
from proofserve.fleet.sql.tables import AnyRow, batches, rounds
from proofserve.rounds.records import StoredResult, Winner

_NONCE_BYTES = 8
_HAS_RESULTS = batches.c.last_seq >= batches.c.first_seq


def after(connection: Connection, seq: int, limit: int) -> list[StoredResult]:
    """The first ``limit`` results with a seq above ``seq``."""
    if limit <= 0:
        return []
    numbers, places = [], 0
    size = batches.c.last_seq - batches.c.first_seq + 1
    chosen = select(batches.c.number, batches.c.first_seq, size.label("size")).where(
        batches.c.last_seq > seq, _HAS_RESULTS
    )
    # Each of them has at least one result.
    for row in connection.execute(chosen.order_by(batches.c.last_seq).limit(limit)):
        numbers.append(row.number)
        places += row.size - max(0, seq + 1 - row.first_seq)
        if places >= limit:
            break
    found: list[StoredResult] = []
    for row in connection.execute(_slices(numbers, seq, limit)):
        found += _results(row)
    return found[:limit]


def newest_winners(connection: Connection, round_id: str, limit: int) -> list[Winner]:
    """The last ``limit`` winners of a round, oldest first; empty for any other round."""
    if limit <= 0:
        return []
    chosen = (
        select(batches.c.number, batches.c.count.label("winners"))
        .join(rounds, rounds.c.number == batches.c.round)
        .where(
            rounds.c.id == round_id, batches.c.kind == BatchKind.WINNERS.value, batches.c.count > 0
        )
        .order_by(batches.c.number.desc())
        .limit(limit)
    )
    numbers, winners = [], 0
    for row in connection.execute(chosen):
        numbers.append(row.number)
        winners += row.winners
        if winners >= limit:
            break
    of_them = select(batches.c.nonces, batches.c.found).where(batches.c.number.in_(numbers))
    found = [
        Winner(nonce, distance)
        for row in connection.execute(of_them.order_by(batches.c.number))
        for nonce, distance in zip(integers(row.nonces), floats(row.found), strict=True)
    ]
    return found[-limit:]


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
            part(batches.c.nonces, literal(_NONCE_BYTES)).label("nonces"),
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
    texts = vector_texts.encode_all(vectors(row.found, row.row_bytes))
    return [
        StoredResult(seq, row.id, nonce, value)
        for seq, nonce, value in zip(places, nonces, texts, strict=True)
    ]


def vectors(found: bytes, row_bytes: int) -> NDArray[np.float16]:
    """The stored vectors float16 [n, width]."""
    return np.frombuffer(found, "<f2").reshape(-1, row_bytes // 2)


def floats(found: bytes) -> list[float]:
    """The stored distances."""
    values: list[float] = np.frombuffer(found, "<f8").tolist()
    return values


def integers(stored: bytes) -> list[int]:
    """The stored nonces."""
    values: list[int] = np.frombuffer(stored, "<i8").tolist()
    return values
