"""A fleet on this machine: a controller on one core, its members on another one."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.fleet.member_process import URLS
from benchmarks.gateway.processes import Service, running
from proofserve.wire import FLEET
from proofserve.wiring.launch import free_port

# The most members of one process.
_OF_PROCESS = 50
_START_S = 180.0


class FleetFailed(Exception):
    """The fleet did not start; the text says what ended or is missing."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """A controller that sees all members as ready, and those members."""

    controller: Service
    url: str
    members: Sequence[str]


@contextmanager
def deployed(folder: Path, members: int, call_s: float, database: str) -> Iterator[Deployed]:
    """A fleet until the context ends. ``database`` is what ``fleet serve`` takes.

    With several cores the controller has the first one, the members share the last one. Raises
    FleetFailed.
    """
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        urls = _start_members(stack, folder, members, call_s, cores[-1])
        home = _made(folder / "controller")
        listed = home / "members.toml"
        listed.write_text("".join(f'[[member]]\nurl = "{url}"\n' for url in urls))
        port = free_port()
        options = ["--port", port, "--database", database, "--members-file", listed]
        lanes = ["--lanes", 2 * members]
        argv = [sys.executable, "-m", "proofserve", "fleet", "serve", *map(str, options + lanes)]
        controller = stack.enter_context(running(argv, cores[0], home))
        url = f"http://127.0.0.1:{port}"
        _wait_until(lambda: _ready(url) == members, [controller], "the fleet")
        yield Deployed(controller, url, urls)


def _start_members(
    stack: ExitStack, folder: Path, members: int, call_s: float, core: int
) -> list[str]:
    """Their URLs, once they all answer."""
    homes, services = [], []
    # They run in other folders, and find this package by its path.
    path = os.pathsep.join(str(Path(each).absolute()) for each in sys.path)
    program = ["env", f"PYTHONPATH={path}", sys.executable, "-m", "benchmarks.fleet.member_process"]
    for first in range(0, members, _OF_PROCESS):
        count = min(_OF_PROCESS, members - first)
        homes.append(_made(folder / f"members-{first}"))
        argv = [*program, str(count), str(call_s)]
        services.append(stack.enter_context(running(argv, core, homes[-1])))
    files = [home / URLS for home in homes]
    _wait_until(lambda: all(file.exists() for file in files), services, "a member")
    return [url for file in files for url in json.loads(file.read_text())]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _ready(url: str) -> int:
    try:
        answer = httpx.get(f"{url}{FLEET}/snapshot?limit=0", trust_env=False)
    except httpx.TransportError:
        return 0
    return int(answer.json()["fleet"]["members"]["ready"]) if answer.is_success else 0


def _wait_until(condition: Callable[[], bool], services: Sequence[Service], what: str) -> None:
    deadline = time.monotonic() + _START_S
    while not condition():
        ended = [service for service in services if not service.runs]
        if ended or time.monotonic() > deadline:
            last = "; ".join(service.last_log_line() for service in ended or services)
            raise FleetFailed(f"{what} is not ready: {last}")
        time.sleep(0.2)
