"""Runs the load generator, and waits until a gateway relays requests."""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gateway.contestants import KEYS
from benchmarks.gateway.errors import Skipped, Unusable
from benchmarks.gateway.processes import Service, Usage, pinned
from benchmarks.gateway.scenarios import Scenario

# Seconds. LiteLLM takes long to import, and all contestants share the machine.
START_LIMIT_S = 90.0
POLL_S = 0.1
# Seconds for the warm-up and the end, beside the measured time.
EXTRA_S = 150.0
# Seconds before memory is read, so that each held stream has had a few events.
SETTLE_S = 3.0
CHAT = {"model": "mock", "messages": [{"role": "user", "content": "Are you there?"}]}

# A line that the load generator prints.
Outcome = dict[str, Any]


class Load:
    """The load generator on its core. Its requests use the clients' keys in turn."""

    def __init__(self, program: Path, core: int) -> None:
        self._program = program
        self._core = core

    def run(self, scenario: Scenario, port: int, seconds: float) -> Outcome:
        """Send the scenario's load to a gateway for ``seconds``."""
        done = subprocess.run(
            self._argv(scenario, port, seconds),
            capture_output=True,
            text=True,
            timeout=(scenario.seconds or seconds) + EXTRA_S,
            check=False,
        )
        return _parsed(done.stdout, done.stderr)

    def hold(
        self, scenario: Scenario, port: int, usage: Callable[[], Usage | None]
    ) -> tuple[Outcome, Usage | None]:
        """Open the scenario's streams, and read the gateway's usage while all are open."""
        argv = self._argv(scenario, port, 0.0)
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            try:
                line = process.stdout.readline() if process.stdout else ""
                outcome = _parsed(line, "it printed nothing")
                if outcome["open"] < scenario.connections:
                    return outcome, None
                time.sleep(SETTLE_S)
                return outcome, usage()
            finally:
                process.kill()

    def _argv(self, scenario: Scenario, port: int, seconds: float) -> Sequence[str]:
        options = [str(self._program), *scenario.options(seconds), "--port", str(port)]
        for key in KEYS:
            options += ["--key", key]
        return pinned(options, self._core)


def wait_until_it_relays(port: int, service: Service) -> None:
    """Return when a chat request is answered.

    Raises:
        Skipped: the service ended, or answers no chat request.
    """
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    deadline = time.monotonic() + START_LIMIT_S
    answer = "no answer"
    with httpx.Client(headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=5.0) as client:
        while time.monotonic() < deadline:
            if not service.runs:
                raise Skipped(f"it ended at once: {service.last_log_line()}")
            try:
                response = client.post(url, json=CHAT)
            except httpx.HTTPError as error:
                answer = str(error)
            else:
                if response.status_code == httpx.codes.OK:
                    return
                answer = f"status {response.status_code}"
            time.sleep(POLL_S)
    raise Skipped(
        f"relays nothing {START_LIMIT_S:.0f} s after its start ({answer}):"
        f" {service.last_log_line()}"
    )


def _parsed(line: str, reason: str) -> Outcome:
    try:
        outcome: Outcome = json.loads(line)
    except ValueError:
        raise Unusable(f"the load generator gave no result: {reason.strip()}") from None
    return outcome
