"""Compares the files of members, fleet and receiver, without the code that wrote them.

Every verdict is judged again, from the rows alone. Every server must have ended, apart from
PostgreSQL.
"""

import base64
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import URL, Connection, Row, create_engine, text
from sqlalchemy.pool import NullPool

from endurance import files
from endurance.files import Delivered
from endurance.fleet.programs import toy_vectors
from proofserve.fleet.sql.tables import read_spec
from proofserve.protocol.nonces import draw
from proofserve.protocol.verdict.counting import SequentialResult, SequentialTest
from proofserve.reports import Figure, Limit
from proofserve.rounds.records import StoredResult, Workload

_BATCHES = """
    SELECT r.id, r.lanes, b.lane, b.kind, b.first_seq, b.count, b.nonces, b.found, b.row_bytes
    FROM fleet_batches b JOIN fleet_rounds r ON r.number = b.round ORDER BY b.number
"""
_LANES = """
    SELECT r.id, l.lane FROM fleet_lanes l JOIN fleet_rounds r ON r.number = l.round
"""
_ROUNDS = "SELECT id, spec FROM fleet_rounds"
_DELIVERIES = "SELECT idempotency_key, url, sequence, state FROM fleet_deliveries"
_UNCUT = "SELECT count(*) FROM fleet_rounds WHERE url IS NOT NULL AND last_batch > cut_batch"

# The fleet's id of a round, and the number of a lane.
LanePlace = tuple[str, int]


@dataclass(frozen=True, slots=True)
class StoredProof:
    """One result in the fleet's database. ``lanes`` is the number of lanes of its round."""

    seq: int
    round_id: str
    lanes: int
    lane: int
    nonce: int
    value: str | float

    @property
    def result(self) -> StoredResult:
        """The result as a controller shows it."""
        vector = self.value if isinstance(self.value, str) else None
        distance = self.value if isinstance(self.value, float) else None
        return StoredResult(self.seq, self.round_id, self.nonce, vector, None, distance)


@dataclass(frozen=True, slots=True)
class FleetFile:
    """The fleet's database. ``blocks`` has the block hash of each round.

    ``keys`` are those of callbacks that the receiver has acknowledged, ``sequences`` the sequence
    numbers of all callbacks to it. ``leftovers`` counts what was not delivered to it.
    """

    proofs: Sequence[StoredProof]
    lanes: Sequence[LanePlace]
    blocks: dict[str, str]
    keys: frozenset[str]
    sequences: Sequence[int]
    leftovers: int


def counted(meaning: str) -> Any:
    """A field of an account: a number that has no limit."""
    return field(metadata={"meaning": meaning})


def zero(meaning: str) -> Any:
    """A field of an account: a number that must be 0."""
    return field(metadata={"meaning": meaning, "limit": Limit(0, at_most=True)})


def figures(account: Any, of_wrong: str = "") -> list[Figure]:
    """Those of the fields of an account; ``of_wrong`` begins the names of those with a limit."""
    made = []
    for each in fields(account):
        limit = each.metadata.get("limit")
        name = each.name if limit is None else f"{of_wrong}{each.name}"
        made.append(Figure(name, getattr(account, each.name), each.metadata["meaning"], limit))
    return made


@dataclass(frozen=True, slots=True)
class FleetAccount:
    """The comparison. A proof is a nonce of a round with its vector or distance."""

    rounds: int = counted("of both protocols in turn")
    lanes: int = counted("given")
    proofs: int = counted("artifacts and winners in the members' files")
    lanes_twice: int = zero("lanes given twice, or proved by two rounds of members")
    proved_twice: int = zero("nonces that two members proved")
    lost: int = zero("proofs of members that the fleet has not stored")
    altered: int = zero("proofs that are stored with another value")
    stored_twice: int = zero("nonces stored twice")
    foreign: int = zero("stored nonces that no member has proved")
    outside: int = zero("stored nonces of another lane")
    gaps: int = zero("lanes that lack a nonce before their last one")
    not_received: int = zero("stored proofs that the receiver has not")
    unknown: int = zero("proofs that only the receiver has")
    duplicates: int = zero("nonces that the receiver has from two callbacks")
    keys: int = zero("callbacks that one side has only, missing sequences")
    leftovers: int = zero("rows undelivered, or of a round without an end")
    damaged: int = zero("SQLite files in which SQLite's check finds faults")
    repeats: int = counted("callbacks that the receiver got twice under one key")


def read_fleet(database: URL) -> FleetFile:
    with create_engine(database, poolclass=NullPool).connect() as connection:
        deliveries = connection.execute(text(_DELIVERIES)).all()
        undelivered = sum(row.state != "done" for row in deliveries)
        rounds = connection.execute(text(_ROUNDS))
        return FleetFile(
            proofs=[p for row in connection.execute(text(_BATCHES)) for p in _proofs(row)],
            lanes=[(row.id, row.lane) for row in connection.execute(text(_LANES))],
            blocks={row.id: json.loads(row.spec)["work"]["block"]["hash"] for row in rounds},
            keys=frozenset(row.idempotency_key for row in deliveries if row.state == "done"),
            sequences=[row.sequence for row in deliveries],
            leftovers=undelivered + connection.execute(text(_UNCUT)).scalar_one(),
        )


def account(
    fleet: FleetFile, outboxes: Iterable[Path], receiver_file: Path, url: str
) -> FleetAccount:
    """Compare; ``url`` is the address at which members reach the fleet."""
    members = [files.delivered(outbox, url) for outbox in outboxes]
    theirs = files.received(receiver_file)
    # By the fleet's round and the nonce.
    proved = [
        ((_place(each.rounds[round_id])[0], nonce), value)
        for each in members
        for round_id, nonce, value in each.proofs
    ]
    stored = {(proof.round_id, proof.nonce): proof.value for proof in fleet.proofs}
    sent = {(fleet.blocks[p.round_id], p.nonce, p.value) for p in fleet.proofs}
    own, numbers = dict(proved), set(range(1, len(fleet.sequences) + 1))
    return FleetAccount(
        rounds=len(fleet.blocks),
        lanes=len(fleet.lanes),
        proofs=len(proved),
        lanes_twice=_lanes_twice(fleet, members),
        proved_twice=len(proved) - len(own),
        lost=len(own.keys() - stored.keys()),
        altered=sum(stored[nonce] != own[nonce] for nonce in own.keys() & stored.keys()),
        stored_twice=len(fleet.proofs) - len(stored),
        foreign=len(stored.keys() - own.keys()),
        outside=sum(proof.nonce % proof.lanes != proof.lane for proof in fleet.proofs),
        gaps=_gaps(fleet.proofs),
        not_received=len(sent - theirs.proofs),
        unknown=len(theirs.proofs - sent),
        duplicates=theirs.duplicates,
        repeats=theirs.repeats,
        keys=len(fleet.keys ^ theirs.keys) + len(numbers - set(fleet.sequences)),
        leftovers=fleet.leftovers + sum(each.leftovers for each in members),
        damaged=len(theirs.damaged) + sum(len(each.damaged) for each in members),
    )


def _proofs(row: Row[Any]) -> list[StoredProof]:
    """The results of one stored callback."""
    nonces: list[int] = np.frombuffer(row.nonces, "<i8").tolist()
    return [
        StoredProof(row.first_seq + place, row.id, row.lanes, row.lane, nonce, value)
        for place, (nonce, value) in enumerate(zip(nonces, _values(row), strict=True))
    ]


def _values(row: Row[Any]) -> Sequence[str | float]:
    """Vectors as the base64 of their float16 values, or distances."""
    if row.kind == "winners":
        distances: list[float] = np.frombuffer(row.found, "<f8").tolist()
        return distances
    width = row.row_bytes
    rows = (row.found[at : at + width] for at in range(0, len(row.found), width))
    return [base64.b64encode(each).decode() for each in rows]


def _place(url: str) -> LanePlace:
    """The lane of a callback URL that a controller has made."""
    _, round_id, lane = url.rsplit("/", 2)
    return round_id, int(lane)


def _lanes_twice(fleet: FleetFile, members: Iterable[Delivered]) -> int:
    given = Counter(fleet.lanes)
    proved = Counter(_place(url) for each in members for url in each.rounds.values())
    return sum(count > 1 for count in (*given.values(), *proved.values()))


def _gaps(proofs: Iterable[StoredProof]) -> int:
    indices: dict[LanePlace, set[int]] = {}
    for proof in proofs:
        of_lane = indices.setdefault((proof.round_id, proof.lane), set())
        of_lane.add(proof.nonce // proof.lanes)
    return sum(len(found) != max(found) + 1 for found in indices.values())


# -- jobs of verification, and their verdicts ------------------------------------------------------

# As the option --p-fraud of ``proofserve verify``.
_P_FRAUD = 0.5
# As a worker names its lock.
_WORKER = re.compile("worker-(.*)-.*")
_OPEN, _ENDED = ("queued", "running"), ("done", "failed")
ABSTAINED = "abstained"
_OPEN_JOBS = "SELECT id, state, worker FROM fleet_jobs WHERE state IN ('queued', 'running')"
# Distances are never sampled, so their lanes wait for nothing.
# The fleet looks at the eight rounds before the newest one, for ten minutes after their end.
_DUE = """
    SELECT count(*) FROM fleet_lanes l JOIN fleet_rounds r ON r.number = l.round
    WHERE l.stored - l.sampled_stored >= :sample AND r.spec LIKE '%"target": null%'
    AND r.number > (SELECT max(number) - 9 FROM fleet_rounds)
    AND (r.ended_at IS NULL OR r.ended_at > :since)
"""
_SAMPLED_FOR_S = 540.0
_JOBS = """
    SELECT j.id, m.url, r.spec, j.round, j.lane, j.rule, j.alpha_share, j.seed, j.after_batch,
           j.through_batch, j.state, j.attempts
    FROM fleet_jobs j JOIN fleet_members m ON m.id = j.member
    JOIN fleet_rounds r ON r.number = j.round ORDER BY j.number
"""
_SAMPLED = """
    SELECT nonces, found FROM fleet_batches
    WHERE round = :round AND lane = :lane AND number > :after AND number <= :through
    ORDER BY number
"""
_VERDICTS = (
    "SELECT job, outcome, reason, nonces, distances, report FROM fleet_verdicts ORDER BY number"
)
_COUNTS = "SELECT outcome, count FROM fleet_verdict_counts"


@dataclass(frozen=True, slots=True, eq=False)
class StoredJob:
    """A job, and what was stored of its lane: ``nonces`` int64 [n], ``vectors`` float16 [n, width].

    ``member`` is its URL.
    """

    id: str
    member: str
    work: Workload
    rule: Mapping[str, Any]
    alpha: float
    seed: str
    state: str
    attempts: int
    nonces: NDArray[np.int64]
    vectors: NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class StoredVerdict:
    """A verdict after ``nonces`` nonces; ``taken`` are those in its report."""

    job: str
    outcome: str
    reason: str | None
    nonces: int
    taken: tuple[int, ...]
    distances: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class VerdictFile:
    """The rows about verification; ``counts`` has the fleet's own count of each outcome."""

    jobs: Sequence[StoredJob]
    verdicts: Sequence[StoredVerdict]
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class VerdictAccount:
    """Verdicts are judged again; an abstention judges nothing, and is counted only."""

    jobs: int = counted("samples of members' lanes")
    retaken: int = counted("of them begun again, after a kill or a fault")
    verdicts: int = counted("one for each job")
    convictions: int = counted("of them of the member that cheats")
    abstained: int = counted("of them without a judgement")
    open: int = zero("jobs that have not ended")
    without: int = zero("jobs that have ended without a verdict")
    twice: int = zero("jobs with several verdicts")
    early: int = zero("verdicts of a job that has not ended, or of none")
    incomplete: int = zero("verdicts of another sample than the job's")
    wrong: int = zero("honest members convicted, cheats cleared, and what was not decided")
    miscounted: int = zero("outcomes of which the fleet counts another number")


@dataclass(frozen=True, slots=True)
class OpenJobs:
    """The jobs of a fleet that runs, read from its database."""

    database: URL

    def ids(self) -> set[str]:
        """Those that wait or run."""
        return {row.id for row in self._read(_OPEN_JOBS)}

    def workers(self) -> set[str]:
        """The names of the processes that have begun one, and not ended it."""
        running = (row for row in self._read(_OPEN_JOBS) if row.state == "running")
        return {_WORKER.sub(r"\1", row.worker) for row in running}

    def all_ended(self, sample: int) -> bool:
        """Whether none is open, and no lane waits for its next sample of ``sample`` nonces."""
        due = self._read(_DUE, sample=sample, since=time.time() - _SAMPLED_FOR_S)
        return due[0][0] == 0 and not self.ids()

    def _read(self, query: str, **values: float) -> Sequence[Row[Any]]:
        engine = create_engine(self.database, poolclass=NullPool)
        with engine.connect() as connection:
            return connection.execute(text(query), values).all()


def read_verdicts(database: URL) -> VerdictFile:
    with create_engine(database, poolclass=NullPool).connect() as connection:
        return VerdictFile(
            jobs=[_job(connection, row) for row in connection.execute(text(_JOBS)).all()],
            verdicts=[_verdict(row) for row in connection.execute(text(_VERDICTS))],
            counts={row.outcome: row.count for row in connection.execute(text(_COUNTS)).mappings()},
        )


def account_verdicts(file: VerdictFile, cheats: frozenset[str]) -> VerdictAccount:
    """Judge again; ``cheats`` are the URLs of the members that sent wrong vectors."""
    jobs = {job.id: job for job in file.jobs}
    number = Counter(verdict.job for verdict in file.verdicts)
    outcomes = Counter(verdict.outcome for verdict in file.verdicts)
    judged = [v for v in file.verdicts if v.outcome != ABSTAINED and v.job in jobs]
    return VerdictAccount(
        jobs=len(jobs),
        retaken=sum(job.attempts > 1 for job in file.jobs),
        verdicts=len(file.verdicts),
        convictions=outcomes["fraud"],
        abstained=outcomes[ABSTAINED],
        open=sum(job.state in _OPEN for job in file.jobs),
        without=sum(job.state in _ENDED and not number[job.id] for job in file.jobs),
        twice=sum(count > 1 for count in number.values()),
        early=sum(v.job not in jobs or jobs[v.job].state in _OPEN for v in file.verdicts),
        incomplete=sum(not _is_complete(jobs[v.job], v) for v in judged),
        wrong=sum(
            v.outcome != ("fraud" if jobs[v.job].member in cheats else "honest") for v in judged
        ),
        miscounted=sum(
            outcomes[outcome] != file.counts.get(outcome, 0)
            for outcome in outcomes.keys() | file.counts.keys()
        ),
    )


def _is_complete(job: StoredJob, verdict: StoredVerdict) -> bool:
    """Whether the verdict is what the whole sample of the job gives."""
    outcome, distances = _judged(job)
    said = verdict.outcome, verdict.taken, verdict.nonces, len(verdict.distances)
    if said != (outcome, tuple(distances), len(distances), len(distances)):
        return False
    return np.allclose(list(distances.values()), verdict.distances)


def _judged(job: StoredJob) -> tuple[str, dict[int, float]]:
    """The outcome of a job, and the distance of each nonce until the test is certain."""
    rule = job.rule
    vectors = dict(zip(job.nonces.tolist(), job.vectors, strict=True))
    order = draw(vectors, job.seed, rule["nonces"])
    theirs = {nonce: vectors[nonce] for nonce in order}
    ours = toy_vectors(job.work, order)
    test = SequentialTest(rule["p_mismatch"], _P_FRAUD, job.alpha, rule["beta"])
    distances: dict[int, float] = {}
    for nonce in order:
        error = theirs[nonce].astype("f4") - ours[nonce].astype("f2").astype("f4")
        distances[nonce] = float(np.linalg.norm(error))
        far = sum(each > rule["dist_threshold"] for each in distances.values())
        result = test.result(far, len(distances))
        if result is not SequentialResult.UNDECIDED:
            return result.value, distances
    return SequentialResult.UNDECIDED.value, distances


def _job(connection: Connection, row: Row[Any]) -> StoredJob:
    of = {"round": row.round, "lane": row.lane, "after": row.after_batch}
    batches = connection.execute(text(_SAMPLED), of | {"through": row.through_batch}).all()
    work, rule = read_spec(row.spec).work, json.loads(row.rule)
    found = np.frombuffer(b"".join(batch.found for batch in batches), "<f2")
    return StoredJob(
        *(row.id, row.url, work, rule, row.alpha_share * rule["alpha_per_day"]),
        *(row.seed, row.state, row.attempts),
        nonces=np.frombuffer(b"".join(batch.nonces for batch in batches), "<i8"),
        vectors=found.reshape(-1, work.scheme.width),
    )


def _verdict(row: Row[Any]) -> StoredVerdict:
    distances: list[float] = np.frombuffer(row.distances, "<f4").tolist()
    report = {} if row.report is None else json.loads(row.report)["distances"]
    taken = tuple(int(nonce) for nonce in report)
    return StoredVerdict(row.job, row.outcome, row.reason, row.nonces, taken, tuple(distances))
