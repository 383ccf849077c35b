"""API processes of their own, with real sockets and a real outbox: the owner is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.support import ORDER
from proofserve.wiring.launch import free_port
from proofserve.wiring.owner import address

SCRIPT = Path(__file__).with_name("api_process.py")
TESTS = SCRIPT.parents[1]
SERVER = "server"


class Served:
    def __init__(self, folder: Path, name: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}/api/v1/pow"
        env = {name: value for name, value in os.environ.items() if not name.startswith("POC_")}
        env |= {"POC_ENABLED": "1", "POC_OUTBOX": str(folder / "outbox.sqlite")}
        env["PYTHONPATH"] = os.pathsep.join([*sys.path, str(TESTS)])
        with (folder / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, SCRIPT, SERVER, str(port)], env=env, stdout=log, stderr=log
            )

    def ask(self, method: str, path: str, **more: Any) -> Any:
        answer = httpx.request(method, self.url + path, timeout=60, **more)
        assert answer.is_success, answer.text
        return answer.json()

    def is_up(self) -> bool:
        assert self.process.poll() is None, "the process ended during its start"
        try:
            return httpx.get(f"{self.url}/health/live", timeout=5).is_success
        except httpx.TransportError:
            return False


@contextmanager
def served(folder: Path, count: int) -> Iterator[list[Served]]:
    with ExitStack() as ending:
        made = [Served(folder, f"process-{number}") for number in range(count)]
        for each in made:
            ending.callback(each.process.wait)
            ending.callback(each.process.kill)
        for each in made:
            until(each.is_up)
        yield made


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def processed(process: Served) -> int:
    stats = process.ask("GET", "/status")["stats"]
    return int(stats["total_processed"]) if stats else 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_each_next_owner_goes_on_and_no_nonce_is_lost_or_twice(
    number: signal.Signals, tmp_path: Path
) -> None:
    with served(tmp_path, 3) as processes:
        left = list(processes)
        left[-1].ask("POST", "/init/generate", json=ORDER)
        round_id = left[0].ask("GET", "/status")["round_id"]
        while len(left) > 1:
            before = processed(left[0])
            until(lambda before=before: processed(left[0]) > before + 50)
            found = address.read(tmp_path / "outbox.sqlite")
            assert found is not None
            (owner,) = [each for each in left if each.process.pid == found.process]
            left.remove(owner)
            reported = processed(left[0])
            owner.process.send_signal(number)
            owner.process.wait(30)
            # Every process that is left answers, and the round is the same.
            for each in left:
                status = each.ask("GET", "/status")
                assert (status["round_id"], status["status"]) == (round_id, "GENERATING")
                assert status["stats"]["total_processed"] >= reported
        before = processed(left[0])
        until(lambda: processed(left[0]) > before + 50)
        left[0].ask("POST", "/stop")
        rows = left[0].ask("GET", "/results?limit=10000")["results"]
        nonces = [row["nonce"] for row in rows]
        assert len(nonces) > 150
        assert nonces == [1 + 3 * index for index in range(len(nonces))]
        assert {row["round_id"] for row in rows} == {round_id}
