"""The tables of verification jobs and verdicts, beside those in ``sql.tables``."""

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
)

from proofserve.fleet.sql.tables import NUMBER, metadata, partial_index

# What `calibrate noise` wrote, by its SHA-256: workers on other machines read it here.
calibrations = Table(
    "fleet_calibrations",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("content", Text, nullable=False),
)

jobs = Table(
    "fleet_jobs",
    metadata,
    Column("number", NUMBER, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("member", Text, ForeignKey("fleet_members.id"), nullable=False),
    Column("round", NUMBER, nullable=False),
    Column("lane", Integer, nullable=False),
    Column("cause", Text, nullable=False),
    Column("queue", Text, nullable=False),
    # A ``VerificationRule`` as JSON.
    Column("rule", Text, nullable=False),
    Column("weights_digest", Text),
    Column("model", Text),
    # The sample: ``seed`` draws it from the lane's batches after ``after_batch``.
    Column("seed", Text, nullable=False),
    Column("after_batch", BigInteger, nullable=False),
    Column("through_batch", BigInteger, nullable=False),
    Column("asked_at", Double, nullable=False),
    # Of the alpha that the rule has for a day (``alpha_spending``).
    Column("alpha_share", Double, nullable=False, server_default="0"),
    Column("state", Text, nullable=False, server_default="queued"),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("worker", Text),
    Column("started_at", Double),
    Column("ended_at", Double),
    ForeignKeyConstraint(["round", "lane"], ["fleet_lanes.round", "fleet_lanes.lane"]),
    CheckConstraint("state IN ('queued', 'running', 'done', 'failed')", name="state"),
)
partial_index("ix_fleet_jobs_open", jobs.c.number, where="state IN ('queued', 'running')")
Index("ix_fleet_jobs_member", jobs.c.member, jobs.c.asked_at)
partial_index("ix_fleet_jobs_failed", jobs.c.ended_at, where="state = 'failed'")

verdicts = Table(
    "fleet_verdicts",
    metadata,
    Column("number", NUMBER, primary_key=True),
    # A job has one verdict at most, also if several workers computed it.
    Column("job", Text, ForeignKey("fleet_jobs.id"), nullable=False, unique=True),
    Column("member", Text, ForeignKey("fleet_members.id"), nullable=False),
    Column("round", NUMBER, nullable=False),
    Column("lane", Integer, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("reason", Text),
    Column("test", Text),
    Column("nonces", Integer, nullable=False),
    Column("distance", Double),
    Column("threshold", Double),
    Column("log_evidence", Double),
    Column("p_value", Double),
    Column("at", Double, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("worker", Text),
    # The chance that it convicts an honest member; null in rows of older versions.
    Column("alpha", Double),
    # float32, little-endian: the distance of each nonce that was recomputed.
    Column("distances", LargeBinary, nullable=False),
    # The report of ``verify`` as JSON; null for an abstention.
    Column("report", Text),
    CheckConstraint("outcome IN ('honest', 'fraud', 'undecided', 'abstained')", name="outcome"),
    CheckConstraint("(outcome = 'abstained') = (report IS NULL)", name="report"),
)
Index("ix_fleet_verdicts_member", verdicts.c.member, verdicts.c.number)

# How many verdicts there are: counting them for each view would be slow.
verdict_counts = Table(
    "fleet_verdict_counts",
    metadata,
    Column("outcome", Text, primary_key=True),
    Column("count", BigInteger, nullable=False),
)
