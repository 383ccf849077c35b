"""The second version: verification jobs and verdicts."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def _texts(*names: str) -> "list[sa.Column[Any]]":
    return [sa.Column(name, sa.Text, nullable=False) for name in names]


def _maybe(kind: "type[sa.types.TypeEngine[Any]]", *names: str) -> "list[sa.Column[Any]]":
    return [sa.Column(name, kind) for name in names]


def _of_lane() -> "list[Any]":
    return [
        sa.Column("member", sa.Text, sa.ForeignKey("fleet_members.id"), nullable=False),
        sa.Column("round", _NUMBER, nullable=False),
        sa.Column("lane", sa.Integer, nullable=False),
    ]


def upgrade() -> None:
    op.add_column("fleet_members", sa.Column("verdict", sa.BigInteger))
    op.add_column("fleet_lanes", sa.Column("sampled_at", sa.Double))
    for name in ("sampled_batch", "sampled_stored"):
        zero = sa.Column(name, sa.BigInteger, nullable=False, server_default="0")
        op.add_column("fleet_lanes", zero)
    op.create_table(
        "fleet_calibrations", sa.Column("digest", sa.Text, primary_key=True), *_texts("content")
    )
    _jobs()
    _verdicts()
    op.create_table(
        "fleet_verdict_counts",
        sa.Column("outcome", sa.Text, primary_key=True),
        sa.Column("count", sa.BigInteger, nullable=False),
    )


def _jobs() -> None:
    op.create_table(
        "fleet_jobs",
        sa.Column("number", _NUMBER, primary_key=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        *_of_lane(),
        *_texts("cause", "queue", "rule"),
        *_maybe(sa.Text, "weights_digest", "model"),
        *_texts("seed"),
        sa.Column("after_batch", sa.BigInteger, nullable=False),
        sa.Column("through_batch", sa.BigInteger, nullable=False),
        sa.Column("asked_at", sa.Double, nullable=False),
        sa.Column("state", sa.Text, nullable=False, server_default="queued"),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        *_maybe(sa.Text, "worker"),
        *_maybe(sa.Double, "started_at", "ended_at"),
        sa.ForeignKeyConstraint(["round", "lane"], ["fleet_lanes.round", "fleet_lanes.lane"]),
        sa.CheckConstraint("state IN ('queued', 'running', 'done', 'failed')", name="state"),
    )
    _create_partial_index("ix_fleet_jobs_open", "number", "state IN ('queued', 'running')")
    _create_partial_index("ix_fleet_jobs_failed", "ended_at", "state = 'failed'")


def _verdicts() -> None:
    outcomes = "outcome IN ('honest', 'fraud', 'undecided', 'abstained')"
    op.create_table(
        "fleet_verdicts",
        sa.Column("number", _NUMBER, primary_key=True),
        sa.Column("job", sa.Text, sa.ForeignKey("fleet_jobs.id"), nullable=False, unique=True),
        *_of_lane(),
        *_texts("outcome"),
        *_maybe(sa.Text, "reason", "test"),
        sa.Column("nonces", sa.Integer, nullable=False),
        *_maybe(sa.Double, "distance", "threshold", "log_evidence", "p_value"),
        *(sa.Column(name, sa.Double, nullable=False) for name in ("at", "seconds")),
        *_maybe(sa.Text, "worker"),
        sa.Column("distances", sa.LargeBinary, nullable=False),
        *_maybe(sa.Text, "report"),
        sa.CheckConstraint(outcomes, name="outcome"),
        sa.CheckConstraint("(outcome = 'abstained') = (report IS NULL)", name="report"),
    )
    op.create_index("ix_fleet_verdicts_member", "fleet_verdicts", ["member", "number"])


def _create_partial_index(name: str, column: str, where: str) -> None:
    condition = sa.text(where)
    op.create_index(
        name, "fleet_jobs", [column], sqlite_where=condition, postgresql_where=condition
    )
