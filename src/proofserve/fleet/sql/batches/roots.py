"""Rounds with roots as rows. Every function runs inside a transaction of the caller."""

from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import Connection, select

from proofserve.fleet.records import FleetRound, RootsOfRound
from proofserve.fleet.sql.batches.new_batch import NewBatch
from proofserve.fleet.sql.dialects import insert_into
from proofserve.fleet.sql.tables import lanes, roots
from proofserve.fleet.sql.texts import kept


def add(connection: Connection, batch: NewBatch) -> None:
    """Count the nonces of a callback with roots."""
    found = batch.roots
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


def find(
    connection: Connection, of: Sequence[FleetRound], round_id: str | None
) -> list[RootsOfRound]:
    """The members' rounds of the fleet's rounds in ``of``; with an id only that one."""
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
    return [
        RootsOfRound(
            row.member_round,
            replace(
                by_number[row.round].nonces_of(row.lane),
                group_id=row.group_id,
                n_groups=row.n_groups,
            ),
            row.committed,
            row.member,
        )
        for row in connection.execute(chosen)
    ]
