"""Reads the results in an outbox file page by page; a server may add results meanwhile."""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from itertools import takewhile

from proofserve.outbox import results
from proofserve.outbox.retry import round_number
from proofserve.rounds.records import StoredResult
from proofserve.wire.records import artifact_record, encoding_of

# Rows that are in memory at a time.
_PAGE = 4096

_FIND = """
    SELECT last_seq, r_target IS NOT NULL, block_hash, block_height, public_key, seq_len, scheme,
           width
    FROM rounds WHERE number = ?
"""


def rows(
    connection: sqlite3.Connection, after: int = 0, round_id: str | None = None
) -> Iterator[StoredResult]:
    """Results with ``seq > after`` in order, of one round or of all rounds.

    Raises ValueError for a round that the outbox does not have.
    """
    number = None if round_id is None else round_number(connection, round_id)
    while page := results.after(connection, after, _PAGE, number):
        yield from page
        after = page[-1].seq


def document(connection: sqlite3.Connection, round_id: str, after: int = 0) -> Iterator[str]:
    """The results of an artifact round, as pieces of the JSON that ``proofserve verify`` reads.

    Its ``nonces`` are those of all rows of the round; a nonce that failed has no artifact.
    Raises ValueError for an unknown round, and for one of the distance protocol.
    """
    number = round_number(connection, round_id)
    last_seq, of_distance, *order = connection.execute(_FIND, (number,)).fetchone()
    if of_distance:
        raise ValueError(
            f"round {round_id!r} is of the distance protocol: POST /validate judges its winners"
        )
    block_hash, block_height, public_key, seq_len, scheme, width = order
    head = {
        "block_hash": block_hash,
        "block_height": block_height,
        "public_key": public_key,
        "params": {"seq_len": seq_len},
        "scheme": json.loads(scheme)["name"],
        "encoding": encoding_of(width),
    }

    def known() -> Iterator[StoredResult]:
        # Both lists cover the same rows: results that are stored meanwhile are in neither list.
        return takewhile(lambda row: row.seq <= last_seq, rows(connection, after, round_id))

    yield f'{json.dumps(head)[:-1]}, "nonces": ['
    yield from _comma_separated(str(row.nonce) for row in known())
    yield '], "artifacts": ['
    yield from _comma_separated(
        json.dumps(artifact_record(row.nonce, row.value))
        for row in known()
        if row.value is not None
    )
    yield "]}\n"


def _comma_separated(items: Iterable[str]) -> Iterator[str]:
    between = ""
    for item in items:
        yield f"{between}{item}"
        between = ","
