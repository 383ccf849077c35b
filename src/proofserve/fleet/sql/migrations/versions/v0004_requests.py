"""Jobs of /generate are rows, and each lane has the weights that the fleet served at its start."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    for name in ("weights_digest", "model"):
        op.add_column("fleet_lanes", sa.Column(name, sa.Text))
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
