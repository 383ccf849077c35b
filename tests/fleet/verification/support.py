"""Lanes whose vectors the tiny model computed, their jobs, and workers as processes."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fleet.sql.support import give_lane
from proofserve.engines.checkpoints import weights_digest
from proofserve.fleet.job_queues import JobSender
from proofserve.fleet.records import (
    BatchKind,
    DesiredState,
    FleetView,
    MemberFindings,
    MemberSource,
)
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification import VerificationControl, VerificationPolicy, queue_name
from proofserve.fleet.verification_records import (
    AfterConviction,
    JobCause,
    VerificationJob,
    VerificationRule,
)
from proofserve.fleet.watch import Overview
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.schemes import scheme
from proofserve.rounds.records import RoundSpec, Workload
from proofserve.rounds.state import Move
from support.four_bits import engine_of
from support.models import TINY_THRESHOLD

STORED = 24
RULE = VerificationRule(
    nonces=12,
    every_s=1,
    dist_threshold=float(TINY_THRESHOLD),
    p_mismatch=0.01,
    # Some nonces are enough for a verdict, though a day has one each second.
    alpha_per_day=0.5,
    conviction=AfterConviction.CORDON,
)


class NothingDue:
    """The part of a watch that the control reads, for a fleet in which no sample is due."""

    current = Overview(FleetView(0.0, (), DesiredState(), ()), (), (), None)


def control_of(
    store: FleetStore, database: str, keep_s: float = 0.0, gone_s: float = 0.0
) -> VerificationControl:
    """The leader's part of verification, for jobs that a test makes."""
    watch: Any = NothingDue()
    sender = partial(JobSender, database)
    return VerificationControl(store.verdicts, watch, VerificationPolicy(), sender, keep_s, gone_s)


async def a_job(
    store: FleetStore, model: Path, name: str, rule: VerificationRule, four_bits: bool = False
) -> VerificationJob:
    """A member, its lane of a new round with STORED artifacts, and a job about all of them."""
    work = Workload(scheme("artifact-v1", k_dim=12), Block("block", 1), "key", 32)
    spec = RoundSpec(uuid.uuid4().hex, work, NonceLane(0, 1), 32, None)
    opened = await store.open_round(spec, 1)
    member = await store.put_member(f"http://{name}", name, MemberSource.LIST)
    lane = await give_lane(store, opened.id, member.id)
    nonces = opened.nonces_of(0).batch(0, STORED)
    vectors = engine_of(model, "bfloat16", four_bits).compute(work, nonces).values
    found = MemberFindings(BatchKind.VECTORS, np.array(nonces), vectors.astype("<f2"))
    await store.ingest(opened, lane, "k", found)
    await store.move(Move.STOP)
    digest = weights_digest(model)
    job = VerificationJob(
        id=uuid.uuid4().hex,
        member_id=member.id,
        round_number=opened.number,
        lane=0,
        cause=JobCause.POLICY,
        queue=queue_name(digest, None),
        rule=rule,
        weights_digest=digest,
        model="tiny",
        seed="seed",
        after_batch=0,
        through_batch=(await store.verdicts.newest_batches(opened.number))[0],
        asked_at=time.time(),
    )
    (job,) = await store.verdicts.add([job])
    return job


@contextmanager
def a_worker(
    folder: Path, database: str, model: Path, name: str
) -> Iterator[subprocess.Popen[bytes]]:
    """``proofserve fleet worker`` as a process; its log is ``NAME.log``."""
    options = ["--database", database, "--model", str(model), "--worker-name", name]
    code = "from proofserve.cli.main import app; app()"
    # Threads would wait for each other, where other tests run.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("ab") as log:
        argv = [sys.executable, "-c", code, "fleet", "worker", *options]
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
