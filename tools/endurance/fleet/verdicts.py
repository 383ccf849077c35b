"""Judges every verdict of a trial again, from the rows alone. The account of jobs and verdicts.

The fleet must have ended, apart from PostgreSQL.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import URL, Connection, Row, create_engine, text
from sqlalchemy.pool import NullPool

from endurance.fleet.account import counted, zero
from endurance.fleet.programs import toy_vectors
from proofserve.fleet.sql.tables import read_spec
from proofserve.protocol.nonces import draw
from proofserve.protocol.verdict.counting import SequentialResult, SequentialTest
from proofserve.rounds.records import Workload

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
_BATCHES = """
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
    batches = connection.execute(text(_BATCHES), of | {"through": row.through_batch}).all()
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
