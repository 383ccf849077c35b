"""Vectors of committed rounds, with their paths, read batch by batch between other transactions."""

import sqlite3
from collections.abc import Sequence

from proofserve.outbox.committed import batches
from proofserve.outbox.database import Database
from proofserve.protocol.commitments import CommittedBatch, Opening, paths
from proofserve.protocol.nonces import NonceLane
from proofserve.rounds.errors import (
    NotCommitted,
    SeveralRounds,
    UnknownNonce,
    UnknownRound,
    VectorsDeleted,
)
from proofserve.rounds.records import CommittedRound

# The most round ids that an error names.
_NAMED = 10

_ROUNDS = """
    SELECT commits_roots, round_id, next_index, node_id, node_count, group_id, n_groups FROM rounds
    WHERE block_hash = ? AND public_key = ? AND round_id = coalesce(?, round_id) ORDER BY number
"""
_BATCH = """
    SELECT rounds.number, first_index, count, root, previous_root
    FROM batches JOIN rounds ON rounds.number = batches.round
    WHERE round_id = ? AND first_index <= ? ORDER BY first_index DESC LIMIT 1
"""


def find(
    connection: sqlite3.Connection, block_hash: str, public_key: str, round_id: str | None
) -> CommittedRound:
    """As the port's ``committed_round``."""
    rows = connection.execute(_ROUNDS, (block_hash, public_key, round_id)).fetchall()
    which = f"block {block_hash}, key {public_key}" + (f", id {round_id}" if round_id else "")
    if not rows:
        raise UnknownRound(f"there is no round of {which}: there never was one, or it is deleted")
    committed = [row[1:] for row in rows if row[0]]
    if not committed:
        raise NotCommitted(f"the round of {which} publishes vectors, not roots")
    if len(committed) > 1:
        named = ", ".join(row[0] for row in committed[-_NAMED:])
        raise SeveralRounds(f"several rounds of {which} publish roots; give round_id: {named}")
    ((found, next_index, *numbers),) = committed
    return CommittedRound(found, NonceLane(*numbers), next_index)


async def openings(
    database: Database, committed: CommittedRound, nonces: Sequence[int]
) -> list[Opening]:
    """As the port. One short transaction for each batch, so that new results need not wait."""
    left = sorted({_index(committed, nonce) for nonce in nonces})
    opened: dict[int, Opening] = {}
    while left:
        found = await database.read(_open_batch, committed, left)
        opened |= {each.nonce: each for each in found}
        left = left[len(found) :]
    return [opened[nonce] for nonce in nonces]


def _index(committed: CommittedRound, nonce: int) -> int:
    index = committed.lane.index_of(nonce)
    if index is None or index >= committed.next_index:
        raise UnknownNonce(f"nonce {nonce} is in no batch of round {committed.round_id} yet")
    return index


def _open_batch(
    connection: sqlite3.Connection, committed: CommittedRound, indices: Sequence[int]
) -> list[Opening]:
    """Open the first of ``indices``, which rise, and all others that are in its batch."""
    row = connection.execute(_BATCH, (committed.round_id, indices[0])).fetchone()
    if row is None:
        raise UnknownRound(f"round {committed.round_id} is deleted")
    batch = CommittedBatch(*row[1:])
    nonces = committed.lane.batch(batch.first_index, batch.count)
    stored = batches.results_of(connection, row[0], nonces)
    asked = [index for index in indices if index < batch.first_index + batch.count]
    places = [index - batch.first_index for index in asked]
    if len(stored) < batch.count:
        raise VectorsDeleted(
            f"the vectors of the batch of nonce {nonces[places[0]]} are deleted: a node keeps them"
            " for POC_OUTBOX_KEEP_DAYS after it delivered their root"
        )
    ways = paths([each.leaf for each in stored], places)
    return [
        Opening(nonces[place], stored[place].value or "", index, batch, way)
        for index, place, way in zip(asked, places, ways, strict=True)
    ]
