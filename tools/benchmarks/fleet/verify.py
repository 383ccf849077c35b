"""Measure verification: ``python -m benchmarks.fleet verify --help``.

Overhead: jobs whose computation is a pause. Speed: workers with a tiny model beside as many
processes that compute the same without queues. No process's start is counted on either side.
"""

import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks.fleet.deployment import START_S, own_path
from benchmarks.fleet.sleeping_worker import QUEUE
from endurance.fleet.postgres import NoPostgres, postgres
from measuring.processes import Process, ProcessFailed, running
from proofserve.engines.checkpoints import weights_digest
from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.network import load
from proofserve.fleet.job_queues import JobSender
from proofserve.fleet.records import (
    BatchKind,
    DesiredState,
    FleetView,
    Lane,
    MemberFindings,
    MemberSource,
)
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification import VerificationControl, VerificationPolicy, queue_name
from proofserve.fleet.verification_records import (
    JobCause,
    JobFinding,
    VerdictOutcome,
    VerificationJob,
    VerificationRule,
    VerificationTask,
)
from proofserve.fleet.watch import Overview
from proofserve.host import machine
from proofserve.models.writer import write_model
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.schemes import scheme
from proofserve.reports import Figure, Limit, Report
from proofserve.rounds.records import RoundSpec, Workload
from proofserve.rounds.state import Move
from proofserve.rounds.tasks import beside
from proofserve.verifier.nodes.members import CheckpointTruths, check_sample

_WIDTH, _BATCH = 12, 8
_LOOK_S = 0.05


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


async def jobs_s(
    database: str,
    pattern: VerificationJob,
    store: FleetStore,
    workers: Sequence[Process],
    count: int,
) -> float:
    """Seconds from making ``count`` jobs like ``pattern`` to the last verdict.

    Each of the ``workers`` has computed a job before, for which it loads its checkpoint. Raises
    ProcessFailed if one has ended or abstains.
    """
    # The part of ``FleetWatch`` that the control reads: the policy wants no sample.
    nothing_due = Overview(FleetView(0.0, (), DesiredState(), ()), (), (), None)
    watch: Any = SimpleNamespace(current=nothing_due)
    sender = partial(JobSender, database)
    control = VerificationControl(store.verdicts, watch, VerificationPolicy(), sender)

    async def run(count: int) -> tuple[float, set[str | None]]:
        names = [uuid.uuid4().hex for _ in range(count)]
        began = time.perf_counter()
        await store.verdicts.add(
            [replace(pattern, id=name, seed=name, asked_at=time.time()) for name in names]
        )
        control.wake()
        while await store.verdicts.open_jobs():
            if ended := [each for each in workers if each.code is not None]:
                raise ProcessFailed("; ".join(each.last_line for each in ended))
            await asyncio.sleep(_LOOK_S)
        seconds = time.perf_counter() - began
        verdicts = await store.verdicts.page(None, 0, count)
        for each in verdicts:
            if each.outcome is not VerdictOutcome.HONEST:
                raise ProcessFailed(f"a verdict is {each.outcome}: {each.reason}")
        return seconds, {each.worker for each in verdicts}

    async with beside("verification", control.run()):
        deadline, seen = time.monotonic() + START_S, set[str | None]()
        while len(seen) < len(workers):
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{len(seen)} of {len(workers)} workers have taken a job")
            seen |= (await run(2 * len(workers)))[1]
        return (await run(count))[0]


async def a_pattern(
    store: FleetStore, work: Workload, found: MemberFindings, queue: str, rule: VerificationRule
) -> VerificationJob:
    """A job about ``found``, the first nonces of a new round's one lane; it is not stored."""
    spec = RoundSpec(uuid.uuid4().hex, work, NonceLane(0, 1), 32, None)
    opened = await store.open_round(spec, 1)
    member = await store.put_member("http://member", "member", MemberSource.LIST)
    (lane,) = await store.give_lanes(opened.id, [member.id])
    if not isinstance(lane, Lane):
        raise lane
    await store.ingest(opened, lane, "key", found)
    await store.move(Move.STOP)
    return VerificationJob(
        id="",
        member_id=member.id,
        round_number=opened.number,
        lane=lane.lane,
        cause=JobCause.OPERATOR,
        queue=queue,
        rule=rule,
        weights_digest=None,
        model=None,
        seed="",
        after_batch=0,
        through_batch=(await store.verdicts.newest_batches(opened.number))[lane.lane],
        asked_at=0.0,
    )


@contextmanager
def _workers(folder: Path, count: int, arguments: Sequence[object]) -> Iterator[list[Process]]:
    """Processes of this Python, spread over the cores, each in a folder of its own."""
    cores, env = sorted(os.sched_getaffinity(0)), {**own_path(), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        found = []
        for number in range(count):
            home = folder / f"process-{number}"
            home.mkdir(parents=True)
            argv, core = [sys.executable, *map(str, arguments)], cores[number % len(cores)]
            process = running(argv, home / "log", env=env, cwd=home, core=core)
            found.append(stack.enter_context(process))
        yield found


async def overhead_s(plan: Plan, database: str, folder: Path) -> float:
    """Seconds of a worker's time for each job, beside its computation."""
    found = MemberFindings(
        BatchKind.VECTORS, np.arange(plan.nonces), np.zeros((plan.nonces, _WIDTH), np.float16)
    )
    arguments = ("-m", "benchmarks.fleet.sleeping_worker", database, plan.sleep_s)
    async with await FleetStore.open(database) as store:
        pattern = await a_pattern(store, plan.work, found, QUEUE, plan.rule)
        with _workers(folder, plan.sleepers, arguments) as workers:
            seconds = await jobs_s(database, pattern, store, workers, plan.jobs)
    return plan.sleepers * seconds / plan.jobs - plan.sleep_s


async def workers_s(
    plan: Plan, database: str, folder: Path, model: Path
) -> tuple[float, VerificationTask]:
    """Seconds in which real workers verify ``plan.verified`` jobs, and one of these as a task."""
    nonces = range(plan.nonces)
    network = load(model, "bfloat16", "cpu")
    vectors = ReferenceEngine(_BATCH).compute(plan.work, network, nonces).values.astype("<f2")
    digest = weights_digest(model)
    options = ("--database", database, "--model", model, "--stop-wait-sec", 0)
    arguments = ("-m", "proofserve", "fleet", "worker", *options)
    async with await FleetStore.open(database) as store:
        found = MemberFindings(BatchKind.VECTORS, np.array(nonces), vectors)
        pattern = await a_pattern(store, plan.work, found, queue_name(digest, None), plan.rule)
        pattern = replace(pattern, weights_digest=digest)
        task = await _task(store, pattern)
        with _workers(folder, plan.workers, arguments) as workers:
            seconds = await jobs_s(database, pattern, store, workers, plan.verified)
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


def singles_s(plan: Plan, task: VerificationTask, model: Path) -> float:
    """Seconds in which as many processes verify as much, without queues. Raises ProcessFailed."""
    context = multiprocessing.get_context("spawn")
    loaded, done = (context.Barrier(plan.workers + 1) for _ in range(2))
    count, cores = plan.verified // plan.workers, sorted(os.sched_getaffinity(0))
    for number in range(plan.workers):
        what = (task, model, count, cores[number % len(cores)], loaded, done)
        context.Process(target=verify_alone, args=what, daemon=True).start()
    try:
        loaded.wait(START_S)
        began = time.monotonic()
        done.wait(START_S)
    except BrokenBarrierError as error:
        raise ProcessFailed("a process without a queue is not ready, or not done") from error
    return time.monotonic() - began


def verify_alone(
    task: VerificationTask, model: Path, count: int, core: int, loaded: Barrier, done: Barrier
) -> None:
    """Verify ``count`` times as ``proofserve verify`` does, once before to load the checkpoint."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    check = partial(check_sample, truth=CheckpointTruths({task.job.queue: model}))
    check(task)
    loaded.wait()
    found = {check(task).outcome for _ in range(count)}
    if found != {VerdictOutcome.HONEST}:
        raise SystemExit(f"verdicts are {', '.join(found)}")
    done.wait()


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
    single_s = singles_s(plan, task, model)
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
