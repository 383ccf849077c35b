"""Each job has its share of the alpha of a day, and each verdict states its alpha."""

import json
from collections import Counter

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    share = sa.Column("alpha_share", sa.Double, nullable=False, server_default="0")
    op.add_column("fleet_jobs", share)
    op.add_column("fleet_verdicts", sa.Column("alpha", sa.Double))
    op.create_index("ix_fleet_jobs_member", "fleet_jobs", ["member", "asked_at"])
    _rules()


def _rules() -> None:
    """A rule's alpha of a verdict becomes that of a day, which the open jobs share."""
    connection = op.get_bind()
    names = ("number", "member", "state", "rule", "alpha_share")
    jobs = sa.table("fleet_jobs", *map(sa.column, names))
    open_ones: Counter[str] = Counter()
    for row in connection.execute(sa.select(jobs).order_by(jobs.c.number)).all():
        rule = json.loads(row.rule)
        rule["alpha_per_day"] = rule.pop("alpha")
        changed: dict[str, object] = {"rule": json.dumps(rule)}
        if row.state in ("queued", "running"):
            open_ones[row.member] += 1
            k = open_ones[row.member]
            changed["alpha_share"] = 1 / (k * (k + 1))
        connection.execute(sa.update(jobs).where(jobs.c.number == row.number).values(changed))
