"""Starts the ordinary vLLM server with the plugin switched on, and stops it again."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from proofserve.settings.process import environment, has_variable, plugin_list

# How long the children of a stopped server may take to end, seconds.
CHILDREN_S = 5.0
VLLM_SERVER = "vllm.entrypoints.launchers.api_server.entry"
PARENT = "proofserve.wiring.server_process"


class ServerFailed(RuntimeError):
    """The server ended, or did not answer in time. The text ends with its last lines."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    argv: tuple[str, ...]
    env: Mapping[str, str]


def server_command(
    model: str, vllm_options: Sequence[str], poc: Mapping[str, str]
) -> ServerCommand:
    env = {"VLLM_PLUGINS": plugin_list(), **poc}
    if not has_variable("VLLM_USE_V2_MODEL_RUNNER"):
        # Proof forwards were verified on the first model runner only.
        env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    argv = (sys.executable, "-m", VLLM_SERVER, "--model", model, *vllm_options)
    return ServerCommand(argv, environment(env))


def exec_server(command: ServerCommand) -> None:
    """Replace this process by a small parent of the server, which passes signals on to it.

    The new process has no option of ours on its command line, so keys cannot be read there.
    """
    interpreter, *module = command.argv
    os.execvpe(  # noqa: S606 - it replaces this process
        interpreter, [interpreter, "-m", PARENT, *module[1:]], dict(command.env)
    )


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    process: "subprocess.Popen[bytes]"
    log: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_server(
    command: ServerCommand,
    port: int,
    log: Path,
    waiting: Callable[[float], None] = lambda _seconds: None,
    timeout_s: float = 300.0,
) -> Iterator[Server]:
    """Run a server until the context ends, in a process group that ends with it.

    ``waiting`` is called about twice a second with the seconds since the start, for progress.

    Raises:
        ServerFailed: it ended or did not answer within ``timeout_s``.
    """
    argv = [*command.argv, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, env=dict(command.env), stdout=out, stderr=out, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _await_health(server, waiting, timeout_s)
        yield server
    finally:
        stop(process)


def stop(process: "subprocess.Popen[bytes]", grace_s: float = 15.0) -> None:
    """End a server and its children by SIGTERM, and by SIGKILL what runs after ``grace_s``."""
    group = process.pid
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    # The children end after the server and free shared memory, which a killed child does not.
    deadline = time.monotonic() + CHILDREN_S
    while _signal_group(group, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal_group(group, signal.SIGKILL)
    process.wait()


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False if it has no process. Signal 0 only checks."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _await_health(server: Server, waiting: Callable[[float], None], timeout_s: float) -> None:
    started = time.monotonic()
    with httpx.Client(timeout=2.0) as client:
        while True:
            elapsed = time.monotonic() - started
            if server.process.poll() is not None:
                raise ServerFailed(_explain(server, f"ended with {server.process.returncode}"))
            if elapsed > timeout_s:
                raise ServerFailed(_explain(server, f"did not answer within {timeout_s:.0f} s"))
            try:
                if client.get(f"{server.url}/health").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            waiting(elapsed)
            time.sleep(0.5)


def _explain(server: Server, what: str) -> str:
    tail = "\n".join(server.log.read_text(errors="replace").splitlines()[-20:])
    return f"the vLLM server {what}; its log is {server.log} and ends with:\n{tail}"
