"""Jobs while the database is gone, and what is said of a job that failed at each try."""

import logging
import time
from pathlib import Path

import pytest

from proofserve.fleet.job_queues import JobRunner, JobSender
from proofserve.fleet.records import StoreUnavailable
from proofserve.fleet.verification_records import JobCause, VerificationJob, VerificationRule
from proofserve.remote.http import wait_until
from proofserve.rounds.errors import EngineFault
from proofserve.wiring.fleet_worker import when_answered

pytestmark = pytest.mark.anyio


class Outage:
    """A method of a store whose first ``failures`` calls find no database."""

    def __init__(self, failures: int) -> None:
        self.calls = 0
        self._failures = failures

    async def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self._failures:
            raise StoreUnavailable("the database is gone")
        return "stored"


async def test_what_is_to_be_stored_waits_for_the_database() -> None:
    outage = Outage(5)
    assert await when_answered(outage, again_s=0.0) == "stored"
    assert outage.calls == 6


async def test_a_database_that_refuses_for_too_long_is_an_error() -> None:
    outage = Outage(5)
    with pytest.raises(StoreUnavailable):
        await when_answered(outage, most_s=-1.0, again_s=0.0)
    assert outage.calls == 1


def test_a_worker_that_finds_no_database_says_so_in_the_log_of_the_process(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    nothing = "postgresql+psycopg://postgres@127.0.0.1:9/none"
    runner = JobRunner(nothing, "worker", {"q": 0.05}, print, 1, lambda _error: False)
    try:
        with pytest.raises(StoreUnavailable, match=r"queues in the fleet's database .* refused"):
            runner.start()
        logging.getLogger("dbos").warning("a queue cannot be read")
    finally:
        runner.close(1)
    assert "a queue cannot be read" in caplog.messages
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow  # DBOS makes its tables: some seconds of processor time
def test_a_job_that_fails_at_each_try_names_the_last_error(tmp_path: Path) -> None:
    url = str(tmp_path / "fleet.sqlite")

    def fails(_job_id: str) -> None:
        raise EngineFault("the device is lost")

    job = VerificationJob(
        id="job",
        member_id="m",
        round_number=1,
        lane=0,
        cause=JobCause.POLICY,
        queue="q",
        rule=VerificationRule(nonces=1),
        weights_digest=None,
        model=None,
        seed="seed",
        after_batch=0,
        through_batch=1,
        asked_at=time.time(),
    )
    sender = JobSender(url)
    runner = JobRunner(url, "worker", {"q": 0.05}, fails, 2, lambda _error: True)
    try:
        runner.start()
        sender.send(job)
        wait_until(lambda: sender.progress([job.id])[job.id].error is not None, "the job's end", 60)
        assert sender.progress([job.id])[job.id].error == "the device is lost"
    finally:
        runner.close(1)
        sender.close()
