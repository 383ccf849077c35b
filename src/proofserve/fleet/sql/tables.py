"""The tables, and what both databases can hold. Times are wall-clock seconds since the epoch."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Row,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite

from proofserve.outbox.database import kept
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.scheme import Scheme
from proofserve.protocol.schemes import from_wire
from proofserve.rounds.records import Job, RoundSpec, Target, Workload

# Other programs, the one with durable jobs for example, may use the same database.
PREFIX = "fleet_"

AnyRow = Row[*tuple[Any, ...]]

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)
# The version of all others, as Alembic makes this table, which earlier versions used.
versions = Table(
    f"{PREFIX}version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name=f"{PREFIX}version_pkc"),
)
# SQLite numbers rows by itself only if their key is a plain INTEGER, which has 64 bits there.
NUMBER = BigInteger().with_variant(Integer, "sqlite")


def partial_index(name: str, *columns: Column[Any], where: str, unique: bool = False) -> Index:
    """An index of the rows for which ``where`` holds."""
    condition = text(where)
    return Index(name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


def kept_if(text: str | None) -> str | None:
    return None if text is None else kept(text)


def insert_into(connection: Connection, table: Table) -> Any:
    """An INSERT that can have ON CONFLICT, which both databases write alike."""
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    return dialect.insert(table)


members = Table(
    "fleet_members",
    metadata,
    Column("id", Text, primary_key=True),
    Column("url", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("wish", Text, nullable=False),
    Column("wish_reason", Text),
    Column("added_at", Double, nullable=False),
    Column("removed_at", Double),
    # A ``MemberLook`` as JSON.
    Column("seen", Text),
    # The number of the newest verdict about it.
    Column("verdict", BigInteger),
)

rounds = Table(
    "fleet_rounds",
    metadata,
    Column("number", NUMBER, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    # A ``RoundSpec`` as JSON; ``about`` is its block hash and key, to find it by them.
    Column("spec", Text, nullable=False),
    Column("about", Text, nullable=False, index=True),
    Column("url", Text),
    Column("opened_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("lanes", Integer, nullable=False),
    Column("given", Integer, nullable=False, server_default="0"),
    Column("stored", BigInteger, nullable=False, server_default="0"),
    # Batches up to ``cut_batch`` are in a delivery already. The next delivery is due one interval
    # after ``interval_from``: the first batch, then each cut.
    Column("last_batch", BigInteger, nullable=False, server_default="0"),
    Column("cut_batch", BigInteger, nullable=False, server_default="0"),
    Column("interval_from", Double),
    # For the foreign key of lanes.
    UniqueConstraint("number", "lanes"),
)
partial_index(
    "ix_fleet_rounds_uncut", rounds.c.number, where="url IS NOT NULL AND last_batch > cut_batch"
)

# One row, which a change of the desired state locks.
desired = Table(
    "fleet_desired",
    metadata,
    Column("id", Integer, CheckConstraint("id = 1", name="one"), primary_key=True),
    Column("state", Text, nullable=False),
    Column("round", NUMBER, ForeignKey("fleet_rounds.number")),
)

lanes = Table(
    "fleet_lanes",
    metadata,
    # The key is what makes lanes disjoint: a lane that was given is never given again.
    Column("round", NUMBER, primary_key=True),
    Column("lane", Integer, primary_key=True),
    # The number of lanes of the round, once more, so that the database checks the lane's range.
    Column("lanes", Integer, nullable=False),
    Column("member", Text, ForeignKey("fleet_members.id"), nullable=False),
    Column("given_at", Double, nullable=False),
    Column("member_round", Text),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("end_reason", Text),
    # Kept with each batch: counting batches for each view would be slow.
    Column("batches", BigInteger, nullable=False, server_default="0"),
    Column("stored", BigInteger, nullable=False, server_default="0"),
    Column("last_stored_at", Double),
    # No stored batch has a nonce with this index of the lane or a greater one.
    Column("next_index", BigInteger, nullable=False, server_default="0"),
    # When the policy last took a sample, up to which batch, and how many nonces were stored then.
    Column("sampled_at", Double),
    Column("sampled_batch", BigInteger, nullable=False, server_default="0"),
    Column("sampled_stored", BigInteger, nullable=False, server_default="0"),
    # What the fleet served when the lane was given, whatever its members serve later.
    Column("weights_digest", Text),
    Column("model", Text),
    ForeignKeyConstraint(["round", "lanes"], ["fleet_rounds.number", "fleet_rounds.lanes"]),
    CheckConstraint("lane >= 0 AND lane < lanes", name="range"),
)
# A member works on one lane of a round at a time.
partial_index(
    "ix_fleet_lanes_open", lanes.c.round, lanes.c.member, where="ended_at IS NULL", unique=True
)

# One row, which every transaction that stores batches locks first: batches and results are
# numbered in the order in which they are committed.
counters = Table(
    "fleet_counters",
    metadata,
    Column("id", Integer, CheckConstraint("id = 1", name="one"), primary_key=True),
    Column("last_batch", BigInteger, nullable=False),
    Column("last_seq", BigInteger, nullable=False),
    # Delivered callbacks that are no rows any more.
    Column("deleted_callbacks", BigInteger, nullable=False, server_default="0"),
)

batches = Table(
    "fleet_batches",
    metadata,
    Column("number", NUMBER, primary_key=True, autoincrement=False),
    Column("round", NUMBER, nullable=False),
    Column("lane", Integer, nullable=False),
    Column("callback_key", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("first_seq", BigInteger, nullable=False),
    Column("last_seq", BigInteger, nullable=False),
    Column("count", BigInteger, nullable=False),
    # The smallest and greatest index in the lane; null for a batch that has nothing new.
    Column("first_index", BigInteger),
    Column("last_index", BigInteger),
    Column("stored_at", Double, nullable=False),
    # int64, little-endian; ``found`` has ``row_bytes`` for each of them: float16 values or one
    # float64, little-endian. Of roots: the first nonces of their batches, and a body as JSON.
    Column("nonces", LargeBinary, nullable=False),
    Column("row_bytes", Integer, nullable=False),
    Column("found", LargeBinary, nullable=False),
    Column("body", Text),
    ForeignKeyConstraint(["round", "lane"], ["fleet_lanes.round", "fleet_lanes.lane"]),
    UniqueConstraint("round", "lane", "callback_key"),
)
Index("ix_fleet_batches_index", batches.c.round, batches.c.lane, batches.c.last_index)
Index("ix_fleet_batches_seq", batches.c.last_seq)
Index("ix_fleet_batches_number", batches.c.round, batches.c.number)

# Where deleted batches were: indices of a lane from ``first_index`` up to ``end_index`` - 1.
deleted_spans = Table(
    "fleet_deleted_spans",
    metadata,
    Column("round", NUMBER, primary_key=True),
    Column("lane", Integer, primary_key=True),
    Column("first_index", BigInteger, primary_key=True, autoincrement=False),
    Column("end_index", BigInteger, nullable=False),
    ForeignKeyConstraint(["round", "lane"], ["fleet_lanes.round", "fleet_lanes.lane"]),
)

# Rounds with roots, by the id that the member gave them: one of a lane, or several if the member is
# a fleet. An id belongs to the lane that used it first: no other member can guess it.
roots = Table(
    "fleet_roots",
    metadata,
    Column("round", NUMBER, primary_key=True),
    Column("member_round", Text, primary_key=True),
    Column("lane", Integer, nullable=False),
    Column("group_id", BigInteger, nullable=False),
    Column("n_groups", BigInteger, nullable=False),
    # How many nonces are under roots.
    Column("committed", BigInteger, nullable=False),
    ForeignKeyConstraint(["round", "lane"], ["fleet_lanes.round", "fleet_lanes.lane"]),
)

# The last sequence of each callback URL.
streams = Table(
    "fleet_streams",
    metadata,
    Column("url", Text, primary_key=True),
    Column("last", BigInteger, nullable=False),
)

deliveries = Table(
    "fleet_deliveries",
    metadata,
    Column("id", NUMBER, primary_key=True),
    Column("endpoint", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("idempotency_key", Text, nullable=False, unique=True),
    # Either the batches ``first_batch`` .. ``last_batch`` of a round, or a body.
    Column("round", NUMBER, ForeignKey("fleet_rounds.number"), index=True),
    Column("first_batch", BigInteger),
    Column("last_batch", BigInteger),
    Column("body", Text),
    Column("state", Text, nullable=False, server_default="pending", index=True),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("created_at", Double, nullable=False),
    Column("next_attempt_at", Double, nullable=False),
    Column("failed_at", Double),
    Column("delivered_at", Double),
    Column("last_error", Text),
    UniqueConstraint("url", "sequence"),
    CheckConstraint("state IN ('pending', 'done', 'expired')", name="state"),
    CheckConstraint("(round IS NULL) = (body IS NOT NULL)", name="about"),
)
partial_index(
    "ix_fleet_deliveries_pending",
    deliveries.c.url,
    deliveries.c.sequence,
    where="state = 'pending'",
)
partial_index("ix_fleet_deliveries_done", deliveries.c.delivered_at, where="state = 'done'")

# Jobs of /generate. The controller that leads computes them in the order of their numbers.
requests = Table(
    "fleet_requests",
    metadata,
    Column("number", NUMBER, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    # How many nonces it has.
    Column("nonces", Integer, nullable=False),
    # A ``Job`` and its ``Outcome`` as JSON.
    Column("job", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("ended_at", Double),
    Column("outcome", Text),
    Column("error", Text),
)
partial_index("ix_fleet_requests_open", requests.c.number, where="ended_at IS NULL")

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
    # Of the alpha that the rule has for a day (``share_of_alpha``).
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
    # The report of ``verify`` as JSON; null for an abstention, and where a member showed nothing.
    Column("report", Text),
    # Of the member's newest verdicts, up to this one.
    Column("unproved", Integer, nullable=False),
    CheckConstraint(
        "outcome IN ('honest', 'fraud', 'undecided', 'unproved', 'abstained')", name="outcome"
    ),
    CheckConstraint(
        "outcome = 'unproved' OR (outcome = 'abstained') = (report IS NULL)", name="report"
    ),
)
Index("ix_fleet_verdicts_member", verdicts.c.member, verdicts.c.number)

# How many verdicts there are: counting them for each view would be slow.
verdict_counts = Table(
    "fleet_verdict_counts",
    metadata,
    Column("outcome", Text, primary_key=True),
    Column("count", BigInteger, nullable=False),
)


# -- specs and jobs as JSON, for columns -----------------------------------------------------------
#
# ASCII only: a block hash or key may hold what a database does not store.


def round_about(block_hash: str, public_key: str) -> str:
    """By which rounds of one block and key are found."""
    return json.dumps([block_hash, public_key])


def record_text(record: RoundSpec | Job) -> str:
    """The fields by name, also those of the records in it."""

    def plain(value: Any) -> Mapping[str, Any]:
        if isinstance(value, Scheme):
            return value.to_wire()
        return {each.name: getattr(value, each.name) for each in fields(value)}

    return json.dumps(record, default=plain)


def read_spec(text: str) -> RoundSpec:
    known = json.loads(text)
    lane, target = known["lane"], known["target"]
    known["work"] = read_work(known["work"])
    known["lane"] = None if lane is None else NonceLane(**lane)
    known["target"] = None if target is None else Target(**target)
    return RoundSpec(**known)


def read_work(known: Mapping[str, Any]) -> Workload:
    scheme, block = from_wire(known["scheme"]), Block(**known["block"])
    return Workload(scheme, block, known["public_key"], known["seq_len"])
