"""The first version: members, rounds, lanes, batches and deliveries."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def _integer(name: str, start: str | None = None) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=start)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _time(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Double, nullable=False)


def _maybe(kind: "type[sa.types.TypeEngine[Any]]", *names: str) -> "list[sa.Column[Any]]":
    return [sa.Column(name, kind) for name in names]


def upgrade() -> None:
    _members_and_rounds()
    _lanes()
    _batches()
    _deliveries()
    state = sa.table("fleet_desired", sa.column("id"), sa.column("state"))
    op.bulk_insert(state, [{"id": 1, "state": "IDLE"}])
    names = ("id", "last_batch", "last_seq")
    counters = sa.table("fleet_counters", *(sa.column(name) for name in names))
    op.bulk_insert(counters, [{"id": 1, "last_batch": 0, "last_seq": 0}])


def _members_and_rounds() -> None:
    op.create_table(
        "fleet_members",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("url", sa.Text, nullable=False, unique=True),
        *(_text(name) for name in ("name", "source", "wish")),
        *_maybe(sa.Text, "wish_reason"),
        _time("added_at"),
        *_maybe(sa.Double, "removed_at"),
        *_maybe(sa.Text, "seen"),
    )
    op.create_table(
        "fleet_rounds",
        sa.Column("number", _NUMBER, primary_key=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        *(_text(name) for name in ("spec", "about")),
        *_maybe(sa.Text, "url"),
        _time("opened_at"),
        *_maybe(sa.Double, "ended_at"),
        sa.Column("lanes", sa.Integer, nullable=False),
        sa.Column("given", sa.Integer, nullable=False, server_default="0"),
        *(_integer(name, "0") for name in ("stored", "last_batch", "cut_batch")),
        *_maybe(sa.Double, "interval_from"),
        sa.UniqueConstraint("number", "lanes"),
    )
    op.create_index("ix_fleet_rounds_about", "fleet_rounds", ["about"])
    uncut = "url IS NOT NULL AND last_batch > cut_batch"
    _create_partial_index("ix_fleet_rounds_uncut", "fleet_rounds", ["number"], uncut)
    op.create_table(
        "fleet_desired",
        sa.Column("id", sa.Integer, sa.CheckConstraint("id = 1", name="one"), primary_key=True),
        _text("state"),
        sa.Column("round", _NUMBER, sa.ForeignKey("fleet_rounds.number")),
    )


def _lanes() -> None:
    op.create_table(
        "fleet_lanes",
        sa.Column("round", _NUMBER, primary_key=True),
        sa.Column("lane", sa.Integer, primary_key=True),
        sa.Column("lanes", sa.Integer, nullable=False),
        sa.Column("member", sa.Text, sa.ForeignKey("fleet_members.id"), nullable=False),
        _time("given_at"),
        *_maybe(sa.Text, "member_round"),
        *_maybe(sa.Double, "started_at", "ended_at"),
        *_maybe(sa.Text, "end_reason"),
        *(_integer(name, "0") for name in ("batches", "stored")),
        *_maybe(sa.Double, "last_stored_at"),
        _integer("next_index", "0"),
        sa.ForeignKeyConstraint(["round", "lanes"], ["fleet_rounds.number", "fleet_rounds.lanes"]),
        sa.CheckConstraint("lane >= 0 AND lane < lanes", name="range"),
    )
    open_ = ("ix_fleet_lanes_open", "fleet_lanes", ["round", "member"], "ended_at IS NULL")
    _create_partial_index(*open_, unique=True)


def _batches() -> None:
    op.create_table(
        "fleet_counters",
        sa.Column("id", sa.Integer, sa.CheckConstraint("id = 1", name="one"), primary_key=True),
        *(_integer(name) for name in ("last_batch", "last_seq")),
    )
    op.create_table(
        "fleet_batches",
        sa.Column("number", _NUMBER, primary_key=True, autoincrement=False),
        sa.Column("round", _NUMBER, nullable=False),
        sa.Column("lane", sa.Integer, nullable=False),
        *(_text(name) for name in ("callback_key", "kind")),
        *(_integer(name) for name in ("first_seq", "last_seq", "count")),
        *_maybe(sa.BigInteger, "first_index", "last_index"),
        _time("stored_at"),
        sa.Column("nonces", sa.LargeBinary, nullable=False),
        sa.Column("row_bytes", sa.Integer, nullable=False),
        sa.Column("found", sa.LargeBinary, nullable=False),
        *_maybe(sa.Text, "body"),
        sa.ForeignKeyConstraint(["round", "lane"], ["fleet_lanes.round", "fleet_lanes.lane"]),
        sa.UniqueConstraint("round", "lane", "callback_key"),
    )
    by_index = ["round", "lane", "last_index"]
    op.create_index("ix_fleet_batches_index", "fleet_batches", by_index)
    op.create_index("ix_fleet_batches_seq", "fleet_batches", ["last_seq"])
    op.create_index("ix_fleet_batches_number", "fleet_batches", ["round", "number"])
    if op.get_context().dialect.name == "postgresql":
        # Vectors do not compress: trying it would take most of the time of an insert. And of a
        # value stored like this a part is read without the rest.
        for column in ("nonces", "found"):
            op.execute(f"ALTER TABLE fleet_batches ALTER COLUMN {column} SET STORAGE EXTERNAL")


def _deliveries() -> None:
    op.create_table("fleet_streams", sa.Column("url", sa.Text, primary_key=True), _integer("last"))
    op.create_table(
        "fleet_deliveries",
        sa.Column("id", _NUMBER, primary_key=True),
        *(_text(name) for name in ("endpoint", "url")),
        _integer("sequence"),
        sa.Column("idempotency_key", sa.Text, nullable=False, unique=True),
        sa.Column("round", _NUMBER, sa.ForeignKey("fleet_rounds.number")),
        *_maybe(sa.BigInteger, "first_batch", "last_batch"),
        *_maybe(sa.Text, "body"),
        sa.Column("state", sa.Text, nullable=False, server_default="pending"),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        *(_time(name) for name in ("created_at", "next_attempt_at")),
        *_maybe(sa.Double, "failed_at", "delivered_at"),
        *_maybe(sa.Text, "last_error"),
        sa.UniqueConstraint("url", "sequence"),
        sa.CheckConstraint("state IN ('pending', 'done', 'expired')", name="state"),
        sa.CheckConstraint("(round IS NULL) = (body IS NOT NULL)", name="about"),
    )
    pending = ("ix_fleet_deliveries_pending", "fleet_deliveries", ["url", "sequence"])
    _create_partial_index(*pending, "state = 'pending'")
    op.create_index("ix_fleet_deliveries_round", "fleet_deliveries", ["round"])
    op.create_index("ix_fleet_deliveries_state", "fleet_deliveries", ["state"])


def _create_partial_index(
    name: str, table: str, columns: list[str], where: str, unique: bool = False
) -> None:
    condition = sa.text(where)
    op.create_index(
        name, table, columns, unique=unique, sqlite_where=condition, postgresql_where=condition
    )
