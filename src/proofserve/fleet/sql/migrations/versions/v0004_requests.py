"""Jobs of /generate and rounds with roots are rows; each lane has what was served at its start."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    _requests()
    _roots()
    for name in ("weights_digest", "model"):
        op.add_column("fleet_lanes", sa.Column(name, sa.Text))


def _roots() -> None:
    op.create_table(
        "fleet_roots",
        sa.Column("round", _NUMBER, primary_key=True),
        sa.Column("member_round", sa.Text, primary_key=True),
        sa.Column("lane", sa.Integer, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("group_id", "n_groups")),
        sa.Column("committed", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["round", "lane"], ["fleet_lanes.round", "fleet_lanes.lane"]),
    )


def _requests() -> None:
    op.create_table(
        "fleet_requests",
        sa.Column("number", _NUMBER, primary_key=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("nonces", sa.Integer, nullable=False),
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("ended_at", sa.Double),
        sa.Column("outcome", sa.Text),
        sa.Column("error", sa.Text),
    )
    condition = sa.text("ended_at IS NULL")
    op.create_index(
        "ix_fleet_requests_open",
        "fleet_requests",
        ["number"],
        sqlite_where=condition,
        postgresql_where=condition,
    )
