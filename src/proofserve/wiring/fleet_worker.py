"""The process of ``proofserve fleet worker``: takes jobs from queues until a signal."""

import asyncio
import logging
import signal
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from proofserve.engines.checkpoints import weights_digest
from proofserve.fleet.job_queues import JobRunner
from proofserve.fleet.records import StoreUnavailable
from proofserve.fleet.sql.locks import ProcessLock, process_lock
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.sql.verdicts import VerdictStore
from proofserve.fleet.verification import WORKER_LOCK, poll_s, queue_name
from proofserve.fleet.verification_records import JobFinding, VerificationTask
from proofserve.protocol.errors import ProtocolError
from proofserve.reports import NodeError
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.tasks import beside
from proofserve.settings.fleet import FleetWorkerSettings
from proofserve.verifier.nodes.members import CheckpointTruths, check_sample

_logger = logging.getLogger(__name__)

T = TypeVar("T")

_HELD_EVERY_S = 1.0
# How long a job waits for a database that is gone, and the pause between two calls, in seconds.
_DATABASE_S, _AGAIN_S = 120.0, 1.0


async def run_worker(
    settings: FleetWorkerSettings,
    queues: Sequence[str],
    check: Callable[[VerificationTask], JobFinding],
) -> None:
    """Give the jobs of ``queues`` to ``check``, in a thread, one at a time, until a signal.

    Raises ValueError for another database than SQLite or PostgreSQL, and StoreUnavailable.
    """

    def may_succeed(error: BaseException) -> bool:
        """Whether the same job may succeed at another try."""
        return isinstance(error, EngineFault | NodeError | StoreUnavailable)

    name = settings.worker_name or socket.gethostname()
    worker = f"{WORKER_LOCK}{name}-{uuid.uuid4().hex[:8]}"
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    lock = process_lock(settings.database, worker)
    async with await FleetStore.open(settings.database) as store:
        if not await lock.take():
            raise StoreUnavailable(f"the lock {worker} of the fleet's database cannot be had")
        async with beside("worker-lock", _hold(lock)):
            verify = _verifier(store.verdicts, check, worker)
            polled = {queue: poll_s(queue) for queue in queues}
            tries = settings.attempts, may_succeed
            runner = JobRunner(settings.database, worker, polled, verify, *tries)
            try:
                await asyncio.to_thread(runner.start)
                _logger.info("worker %s takes jobs of %s", worker, ", ".join(queues))
                await stop.wait()
            finally:
                await asyncio.to_thread(runner.close, settings.stop_wait_sec)
        await lock.give_back()


def _verifier(
    store: VerdictStore, check: Callable[[VerificationTask], JobFinding], worker: str
) -> Callable[[str], None]:
    """What computes the job of an id, and stores its verdict when it is complete.

    It runs in the threads of the queues; the database belongs to the loop of the process.
    """
    loop, one_at_a_time = asyncio.get_running_loop(), threading.Lock()

    def stored(call: Callable[[], Awaitable[T]]) -> T:
        return asyncio.run_coroutine_threadsafe(when_answered(call), loop).result()

    def verify(job_id: str) -> None:
        # Each queue has its own thread, and the memory may hold one model and one forward.
        with one_at_a_time:
            task = stored(partial(store.begin, job_id, worker))
            if task is None:
                _logger.info("job %s has ended before", job_id)
                return
            found = check(task)
            stored(partial(store.finish, task.job, found))
        what = f"{found.outcome} after {found.nonces} nonces, {found.seconds:.2f} s"
        _logger.info("job %s, member %s: %s", job_id, task.member.name, what)

    return verify


async def when_answered(
    call: Callable[[], Awaitable[T]], most_s: float = _DATABASE_S, again_s: float = _AGAIN_S
) -> T:
    """The result of a method of the store, called again while the database is gone.

    Otherwise an outage of seconds would use up all tries of a job. Raises StoreUnavailable after
    ``most_s`` seconds: a database that answers may still refuse what is to be stored.
    """
    deadline = time.monotonic() + most_s
    while True:
        try:
            return await call()
        except StoreUnavailable as error:
            if time.monotonic() > deadline:
                raise
            _logger.warning("a job waits for the database: %s", error)
        await asyncio.sleep(again_s)


async def _hold(lock: ProcessLock) -> None:
    """Keep the lock; a controller that sees it free gives the jobs to another worker."""
    while True:
        await asyncio.sleep(_HELD_EVERY_S)
        if not await lock.take():
            _logger.warning("the lock of this worker is lost: its job may be computed twice")


def worker_checkpoints(settings: FleetWorkerSettings) -> dict[str, Path]:
    """The folders of the checkpoints in the settings, by queue. Raises ValueError.

    Some fleets' members do not say their weights: for these the name of the folder counts. Without
    any a worker judges members by each other alone.
    """
    found: dict[str, Path] = {}
    for text in settings.model or ():
        folder = Path(text).absolute()
        try:
            digest = weights_digest(folder)
        except (ProtocolError, OSError) as error:
            raise ValueError(f"--model {text}: {error}") from error
        found |= {queue_name(digest, None): folder, queue_name(None, folder.name): folder}
    return found


def checker_of(
    settings: FleetWorkerSettings, folders: Mapping[str, Path]
) -> Callable[[VerificationTask], JobFinding]:
    key = settings.member_key
    secret = None if key is None else key.get_secret_value()
    truth = CheckpointTruths(folders, settings.device, settings.forward_batch)
    return partial(check_sample, truth=truth, member_key=secret)
