"""A fleet on this machine: a controller on one core, its members on another one."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.fleet.fake_member import URLS
from measuring.processes import Process, running, wait_until
from proofserve.wire import FLEET
from proofserve.wiring.launch import free_port

# The most members of one process.
_OF_PROCESS = 50
START_S = 180.0


@dataclass(frozen=True, slots=True)
class Deployed:
    """A controller that sees all members as ready, and those members."""

    controller: Process
    url: str
    members: Sequence[str]


@contextmanager
def deployed(folder: Path, members: int, call_s: float, database: str) -> Iterator[Deployed]:
    """A fleet until the context ends. ``database`` is what ``fleet serve`` takes.

    With several cores the controller has the first one, the members share the last one. Raises
    ProcessFailed.
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
        log = home / "controller.log"
        controller = stack.enter_context(running(argv, log, cwd=home, core=cores[0]))
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _ready(url) == members, "the fleet", [controller], START_S)
        yield Deployed(controller, url, urls)


def _start_members(
    stack: ExitStack, folder: Path, members: int, call_s: float, core: int
) -> list[str]:
    """Their URLs, once they all answer."""
    files, services = list[Path](), list[Process]()
    for first in range(0, members, _OF_PROCESS):
        count = min(_OF_PROCESS, members - first)
        home = _made(folder / f"members-{first}")
        argv = [sys.executable, "-m", "benchmarks.fleet.fake_member", str(count), str(call_s)]
        service = running(argv, home / "log", env=own_path(), cwd=home, core=core)
        services.append(stack.enter_context(service))
        files.append(home / URLS)
    wait_until(lambda: all(file.exists() for file in files), "a member", services, START_S)
    return [url for file in files for url in json.loads(file.read_text())]


def own_path() -> dict[str, str]:
    """Processes run in other folders, and find this package by its path."""
    return {"PYTHONPATH": os.pathsep.join(str(Path(each).absolute()) for each in sys.path)}


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _ready(url: str) -> int:
    try:
        answer = httpx.get(f"{url}{FLEET}/snapshot?limit=0", trust_env=False)
    except httpx.TransportError:
        return 0
    return int(answer.json()["fleet"]["members"]["ready"]) if answer.is_success else 0
