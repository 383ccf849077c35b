"""Starts API processes of one server, each of them ``api_process.py``, and asks them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from proofserve.wiring.launch import free_port
from support.pace import wait_until

SCRIPT = Path(__file__).with_name("api_process.py")
TESTS = SCRIPT.parents[1]
SERVER = "server"


class Served:
    def __init__(self, folder: Path, name: str, outbox: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}/api/v1/pow"
        env = {name: value for name, value in os.environ.items() if not name.startswith("POC_")}
        env |= {"POC_ENABLED": "1", "POC_OUTBOX": str(outbox / "outbox.sqlite")}
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
def served(folder: Path, count: int, outbox: Path | None = None) -> Iterator[list[Served]]:
    """The processes keep logs and, unless there is a folder ``outbox``, results in ``folder``."""
    with ExitStack() as ending:
        made = [Served(folder, f"process-{n}", outbox or folder) for n in range(count)]
        for each in made:
            ending.callback(each.process.wait)
            ending.callback(each.process.kill)
        for each in made:
            wait_until(each.is_up)
        yield made


def processed(process: Served) -> int:
    stats = process.ask("GET", "/status")["stats"]
    return int(stats["total_processed"]) if stats else 0
