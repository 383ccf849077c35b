"""Measure verification: ``python -m benchmarks.fleet verify --help``.

Overhead: jobs whose computation is a pause. Speed: workers with a tiny model beside as many
processes that compute the same without queues. No process's start is counted on either side.
"""

import asyncio
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from benchmarks.fleet.deployment import START_S, own_path
from benchmarks.fleet.single_verifier import DONE, GO, READY
from benchmarks.fleet.sleeping_worker import QUEUE
from benchmarks.fleet.verification_jobs import a_pattern, job_bench
from endurance.fleet.postgres import NoPostgres, postgres
from measuring.processes import Process, ProcessFailed, running, wait_until
from proofserve.engines.checkpoints import weights_digest
from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.network import load
from proofserve.fleet.records import BatchKind, MemberFindings
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification import queue_name
from proofserve.fleet.verification_records import (
    JobFinding,
    VerdictOutcome,
    VerificationJob,
    VerificationRule,
    VerificationTask,
)
from proofserve.host import machine
from proofserve.models.writer import write_model
from proofserve.protocol.identity import Block
from proofserve.protocol.schemes import scheme
from proofserve.reports import Figure, Limit, Report
from proofserve.rounds.records import Workload

_WIDTH, _BATCH = 12, 8


class DatabaseKind(StrEnum):
    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"


@dataclass(frozen=True, slots=True)
class Plan:
    """``sleepers`` workers take ``jobs`` jobs of ``sleep_s``; then ``workers`` take ``verified``.

    A job of the second kind recomputes ``nonces`` nonces of ``seq_len`` tokens.
    """

    database: DatabaseKind
    jobs: int = 100
    sleep_s: float = 0.2
    sleepers: int = 2
    verified: int = 40
    workers: int = 4
    nonces: int = 40
    seq_len: int = 256

    @property
    def work(self) -> Workload:
        return Workload(scheme("artifact-v1", k_dim=_WIDTH), Block("block", 1), "key", self.seq_len)

    @property
    def rule(self) -> VerificationRule:
        return VerificationRule(self.nonces, every_s=1, dist_threshold=0.04, p_mismatch=0.01)


class _Processes:
    """Processes of a benchmark, spread over the cores, each in a folder of its own."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._cores = sorted(os.sched_getaffinity(0))
        self.all: list[Process] = []

    def start(self, arguments: Sequence[object]) -> Path:
        """Run this Python with ``arguments``; returns the process's folder."""
        number = len(self.all)
        home = self._folder / f"process-{number}"
        home.mkdir(parents=True)
        argv, env = [sys.executable, *map(str, arguments)], {**own_path(), "OMP_NUM_THREADS": "1"}
        core = self._cores[number % len(self._cores)]
        process = running(argv, home / "log", env=env, cwd=home, core=core)
        self.all.append(self._stack.enter_context(process))
        return home

    def alive(self) -> None:
        """Raises ProcessFailed if a process has ended."""
        if ended := [each for each in self.all if each.code is not None]:
            raise ProcessFailed("; ".join(each.last_line for each in ended))


@contextmanager
def _processes(folder: Path) -> Iterator[_Processes]:
    folder.mkdir()
    with ExitStack() as stack:
        yield _Processes(stack, folder)


async def overhead_s(plan: Plan, database: str, folder: Path) -> float:
    """Seconds of a worker's time for each job, beside its computation."""
    found = MemberFindings(
        BatchKind.VECTORS, np.arange(plan.nonces), np.zeros((plan.nonces, _WIDTH), np.float16)
    )
    async with await FleetStore.open(database) as store:
        pattern = await a_pattern(store, plan.work, found, QUEUE, plan.rule)
        with _processes(folder) as processes:
            for _ in range(plan.sleepers):
                module = "benchmarks.fleet.sleeping_worker"
                processes.start(["-m", module, database, plan.sleep_s])
            async with job_bench(database, pattern, store, processes.alive) as bench:
                await bench.until_each_has_worked(plan.sleepers)
                seconds, _ = await bench.run(plan.jobs)
    return plan.sleepers * seconds / plan.jobs - plan.sleep_s


async def workers_s(
    plan: Plan, database: str, folder: Path, model: Path
) -> tuple[float, VerificationTask]:
    """Seconds in which real workers verify ``plan.verified`` jobs, and one of these as a task."""
    nonces = range(plan.nonces)
    network = load(model, "bfloat16", "cpu")
    vectors = ReferenceEngine(_BATCH).compute(plan.work, network, nonces).values.astype("<f2")
    digest = weights_digest(model)
    async with await FleetStore.open(database) as store:
        found = MemberFindings(BatchKind.VECTORS, np.array(nonces), vectors)
        pattern = await a_pattern(store, plan.work, found, queue_name(digest, None), plan.rule)
        pattern = replace(pattern, weights_digest=digest)
        task = await _task(store, pattern)
        with _processes(folder) as processes:
            for _ in range(plan.workers):
                options = ["--database", database, "--model", model, "--stop-wait-sec", 0]
                processes.start(["-m", "proofserve", "fleet", "worker", *options])
            async with job_bench(database, pattern, store, processes.alive) as bench:
                await bench.until_each_has_worked(plan.workers)
                seconds, _ = await bench.run(plan.verified)
    return seconds, task


async def _task(store: FleetStore, pattern: VerificationJob) -> VerificationTask:
    job = replace(pattern, id="single", seed="single")
    await store.verdicts.add([job])
    task = await store.verdicts.begin(job.id, "the benchmark")
    if task is None:
        raise ProcessFailed("a new job has ended already")
    abstained = JobFinding(VerdictOutcome.ABSTAINED, 0.0, reason="computed without a queue")
    await store.verdicts.finish(job, abstained)
    return task


def singles_s(plan: Plan, task: VerificationTask, folder: Path, model: Path) -> float:
    """Seconds in which as many processes verify as much, without queues. Raises ProcessFailed."""
    file, count = folder / "task", plan.verified // plan.workers
    with _processes(folder) as processes:
        file.write_bytes(pickle.dumps(task))
        module = "benchmarks.fleet.single_verifier"
        homes = [processes.start(["-m", module, file, model, count]) for _ in range(plan.workers)]
        ready = [home / READY for home in homes]
        what = "a process without a queue"
        wait_until(lambda: all(file.exists() for file in ready), what, processes.all, START_S)
        began = time.time()
        (folder / GO).touch()
        done = [home / DONE for home in homes]
        # A process ends when it is done.
        wait_until(lambda: all(file.exists() for file in done), f"the end of {what}", (), START_S)
        return max(float(json.loads(file.read_text())) for file in done) - began


def measure(plan: Plan, folder: Path) -> Report:
    """Raises ProcessFailed, and NoPostgres where there is no PostgreSQL."""
    where, model = machine(), folder / "tiny"
    write_model(model, "qwen3", "tiny")
    with ExitStack() as stack:
        if plan.database is DatabaseKind.POSTGRESQL:
            database = stack.enter_context(postgres()).database()
        else:
            database = str(folder / "fleet.sqlite")
        beside_s = asyncio.run(overhead_s(plan, database, folder / "sleepers"))
        workers = folder / "workers"
        with_queue_s, task = asyncio.run(workers_s(plan, database, workers, model))
    single_s = singles_s(plan, task, folder / "singles", model)
    done = plan.verified
    figures = (
        Figure(
            "overhead_ms",
            1000 * beside_s,
            f"a worker's time for a job beside its computation of {plan.sleep_s} s,"
            f" {plan.sleepers} workers",
            Limit(80, at_most=True),
        ),
        Figure(
            "workers_jobs_per_s", done / with_queue_s, f"{plan.workers} workers, the tiny model"
        ),
        Figure("singles_jobs_per_s", done / single_s, f"{plan.workers} processes without a queue"),
        Figure("workers_over_singles", single_s / with_queue_s, "the ratio of both", Limit(0.9)),
    )
    windows = {"workers_s": with_queue_s, "singles_s": single_s}
    return Report(f"verification, {plan.database}", figures, asdict(plan), windows, where)


def verify(
    database: Annotated[
        DatabaseKind, typer.Option(help="a new SQLite file, or a PostgreSQL that this starts")
    ] = DatabaseKind.SQLITE,
    jobs: Annotated[int, typer.Option(min=2, help="jobs that only pause")] = 100,
    sleep_s: Annotated[float, typer.Option(min=0, help="the pause of such a job, seconds")] = 0.2,
    verified: Annotated[int, typer.Option(min=4, help="jobs of the tiny model")] = 40,
    nonces: Annotated[int, typer.Option(min=1, help="nonces of such a job")] = 40,
    json_: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Measure what queues cost a job, and four workers beside four single verifications."""
    plan = Plan(database, jobs, sleep_s, verified=verified, nonces=nonces)
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        try:
            report = measure(plan, Path(folder))
        except (ProcessFailed, NoPostgres) as error:
            raise SystemExit(str(error)) from error
    Console().print(report.table())
    if json_ is not None:
        report.write(json_)
