"""The process of ``proofserve fleet worker``: takes jobs from queues until a signal."""

import asyncio
import logging
import signal
import socket
import uuid
from collections.abc import Callable
from pathlib import Path

from proofserve.engines.checkpoints.digest import weights_digest
from proofserve.fleet.errors import StoreUnavailable
from proofserve.fleet.sql.locks import ProcessLock, process_lock
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification.controlling import WORKER_LOCK
from proofserve.fleet.verification.durable import JobRunner, Tries
from proofserve.fleet.verification.policy import queue_name
from proofserve.fleet.verification.records import JobFinding, VerificationTask
from proofserve.lab.client.errors import NodeError
from proofserve.protocol.errors import ProtocolError
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.tasks import beside
from proofserve.settings.fleet_worker import FleetWorkerSettings
from proofserve.wiring.verification.checking import SampleChecker, WorkerCheckpoints

_logger = logging.getLogger(__name__)

_HELD_EVERY_S = 1.0


async def run_worker(settings: FleetWorkerSettings) -> None:
    """Take jobs until SIGTERM or SIGINT.

    Raises ValueError for settings that cannot be, NewerDatabase and StoreUnavailable.
    """
    folders = queues_of(settings.model)
    checker = SampleChecker(_checkpoints(settings, folders))
    await take_jobs(settings, tuple(folders), checker.check)


async def take_jobs(
    settings: FleetWorkerSettings,
    queues: tuple[str, ...],
    check: Callable[[VerificationTask], JobFinding],
) -> None:
    """Give the jobs of ``queues`` to ``check``, in a thread, one at a time, until a signal.

    Raises NewerDatabase and StoreUnavailable.
    """
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
            jobs = _Jobs(store, check, worker)
            tries = Tries(settings.attempts, _is_passing)
            runner = JobRunner(settings.database, worker, queues, jobs.verify, tries)
            try:
                await asyncio.to_thread(runner.start)
                _logger.info("worker %s takes jobs of %s", worker, ", ".join(queues))
                await stop.wait()
            finally:
                await asyncio.to_thread(runner.close, settings.stop_wait_sec)
        await lock.give_back()


class _Jobs:
    """Runs in the threads of the queues; the database belongs to the loop of the process."""

    def __init__(
        self, store: FleetStore, check: Callable[[VerificationTask], JobFinding], worker: str
    ) -> None:
        self._store = store.verdicts
        self._check = check
        self._worker = worker
        self._loop = asyncio.get_running_loop()

    def verify(self, job_id: str) -> None:
        """Compute a job, and store its verdict when it is complete."""
        task = self._begin(job_id)
        if task is None:
            _logger.info("job %s has ended before", job_id)
            return
        found = self._check(task)
        finish = self._store.finish(task.job, found)
        asyncio.run_coroutine_threadsafe(finish, self._loop).result()
        what = f"{found.outcome} after {found.nonces} nonces, {found.seconds:.2f} s"
        _logger.info("job %s, member %s: %s", job_id, task.member.name, what)

    def _begin(self, job_id: str) -> VerificationTask | None:
        begin = self._store.begin(job_id, self._worker)
        return asyncio.run_coroutine_threadsafe(begin, self._loop).result()


def queues_of(models: tuple[str, ...]) -> dict[str, Path]:
    """The queues to read, with the checkpoint for each. Raises ValueError.

    A checkpoint is known by its weights, and by the name of its folder in fleets whose members do
    not say their weights.
    """
    if not models:
        raise ValueError("--model: name the folder of at least one checkpoint")
    found: dict[str, Path] = {}
    for text in models:
        folder = Path(text).absolute()
        try:
            digest = weights_digest(folder)
        except (ProtocolError, OSError) as error:
            raise ValueError(f"--model {text}: {error}") from error
        found |= {queue_name(digest, None): folder, queue_name(None, folder.name): folder}
    return found


def _checkpoints(settings: FleetWorkerSettings, folders: dict[str, Path]) -> WorkerCheckpoints:
    key = settings.member_key
    return WorkerCheckpoints(
        folders=folders,
        device=settings.device,
        dtype=settings.dtype,
        forward_batch=settings.forward_batch,
        member_key=None if key is None else key.get_secret_value(),
    )


async def _hold(lock: ProcessLock) -> None:
    """Keep the lock; a controller that sees it free gives the jobs to another worker."""
    while True:
        await asyncio.sleep(_HELD_EVERY_S)
        if not await lock.take():
            _logger.warning("the lock of this worker is lost: its job may be computed twice")


def _is_passing(error: BaseException) -> bool:
    """Whether the same job may succeed at another try."""
    return isinstance(error, EngineFault | NodeError | StoreUnavailable)
