"""Runs the load generator, and waits until a gateway relays requests."""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gateway.contestants import KEYS
from benchmarks.gateway.programs import Skipped, Unusable
from benchmarks.gateway.scenarios import Scenario
from measuring.processes import Process, ProcessFailed, Usage, pinned, wait_until

# Seconds. LiteLLM takes long to import, and all contestants share the machine.
START_LIMIT_S = 90.0
# Seconds for the warm-up and the end, beside the measured time.
EXTRA_S = 150.0
# Seconds before memory is read, so that each held stream has had a few events.
SETTLE_S = 3.0
CHAT = {"model": "mock", "messages": [{"role": "user", "content": "Are you there?"}]}

# A line that the load generator prints.
Outcome = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """The load generator on its core. Its requests use the clients' keys in turn."""

    program: Path
    core: int

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
        options = [str(self.program), *scenario.options(seconds), "--port", str(port)]
        for key in KEYS:
            options += ["--key", key]
        return pinned(options, self.core)


def wait_until_it_relays(port: int, service: Process) -> None:
    """Return when a chat request is answered. Raises Skipped if it ends, or answers none."""
    url, answer = f"http://127.0.0.1:{port}/v1/chat/completions", "no answer"

    def relays() -> bool:
        nonlocal answer
        try:
            response = client.post(url, json=CHAT)
        except httpx.HTTPError as error:
            answer = str(error)
            return False
        answer = f"status {response.status_code}"
        return response.status_code == httpx.codes.OK

    with httpx.Client(headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=5.0) as client:
        try:
            wait_until(relays, "a relayed chat", [service], START_LIMIT_S)
        except ProcessFailed as error:
            raise Skipped(f"{error} ({answer})") from error


def _parsed(line: str, reason: str) -> Outcome:
    try:
        outcome: Outcome = json.loads(line)
    except ValueError:
        raise Unusable(f"the load generator gave no result: {reason.strip()}") from None
    return outcome
