"""Delivered batches are deleted after some time: which places of lanes they had, and counts."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "fleet_deleted_spans",
        sa.Column("round", _NUMBER, primary_key=True),
        sa.Column("lane", sa.Integer, primary_key=True),
        sa.Column("first_index", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("end_index", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["round", "lane"], ["fleet_lanes.round", "fleet_lanes.lane"]),
    )
    deleted = sa.Column("deleted_callbacks", sa.BigInteger, nullable=False, server_default="0")
    op.add_column("fleet_counters", deleted)
    done = sa.text("state = 'done'")
    op.create_index(
        "ix_fleet_deliveries_done",
        "fleet_deliveries",
        ["delivered_at"],
        sqlite_where=done,
        postgresql_where=done,
    )
