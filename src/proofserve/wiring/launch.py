"""Starts the ordinary vLLM server with the plugin switched on, and stops it again."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from proofserve.engines.vetting.features import vetting_of
from proofserve.host import vllm_version
from proofserve.settings.process import environment, has_variable, plugin_list, trace_export

# Those that ``free_port`` chooses from.
PORTS = range(20_000, 32_768)
# How long a stopped server may take to end, and after it its children, seconds.
GRACE_S, CHILDREN_S = 15.0, 5.0
# A server that starts is given up when it has computed less than MOVES_S seconds in STILL_S.
STILL_S, MOVES_S = 300.0, 2.0
VLLM_SERVER = "vllm.entrypoints.launchers.api_server.entry"
# The same before 0.29.
OLD_VLLM_SERVER = "vllm.entrypoints.openai.api_server"
# The same with several API processes.
VLLM_SERVERS = "proofserve.engines.vllm.compat_server"
# How long the processes of such a server may take to end what they do, seconds. vLLM's own default
# is 0: the API processes would be killed right after SIGTERM.
PROCESSES_END_S = 20
PARENT = "proofserve.wiring.server_process"
# Which program a trace names; of OpenTelemetry's SDK.
SERVICE_NAME = "OTEL_SERVICE_NAME"
SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


class ServerFailed(RuntimeError):
    """The server ended, or did not answer in time. The text ends with its last lines."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    argv: tuple[str, ...]
    env: Mapping[str, str]


def server_command(
    model: str, vllm_options: Sequence[str], poc: Mapping[str, str]
) -> ServerCommand:
    vllm_options = [*vllm_options, *trace_options(vllm_options)]
    if not has_several_processes(vllm_options):
        server = (vllm_server(), "--model", model, *vllm_options)
    else:
        waits = of_vllm(vllm_options).shutdown_timeout is not None
        more = () if waits else ("--shutdown-timeout", str(PROCESSES_END_S))
        server = (VLLM_SERVERS, model, *vllm_options, *more)
    env = {"VLLM_PLUGINS": plugin_list(), **runner_choice(), **trace_variables(), **poc}
    return ServerCommand((sys.executable, "-m", *server), environment(env))


def trace_options(vllm_options: Sequence[str]) -> tuple[str, ...]:
    """What makes vLLM export its traces where OpenTelemetry's variables say, unless it does."""
    target = trace_export()
    if target is None or of_vllm(vllm_options).otlp_traces_endpoint is not None:
        return ()
    return ("--otlp-traces-endpoint", target.endpoint)


def trace_variables() -> dict[str, str]:
    """vLLM reads only this variable for the protocol, and takes grpc without it."""
    target = trace_export()
    if target is None:
        return {}
    name = {} if has_variable(SERVICE_NAME) else {SERVICE_NAME: "proofserve-node"}
    return {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": target.protocol, **name}


def vllm_server() -> str:
    """The module of the installed vLLM that is a server of one API process."""
    minor = re.match(r"0\.(\d+)\.", vllm_version() or "")
    return OLD_VLLM_SERVER if minor and int(minor[1]) < 29 else VLLM_SERVER


def has_several_processes(vllm_options: Sequence[str]) -> bool:
    """Whether these options of vLLM start several API processes."""
    return of_vllm(vllm_options).api_server_count not in ("0", "1")


def of_vllm(options: Sequence[str]) -> Namespace:
    """Those of vLLM's options that decide where and how a server starts; None where not given."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--api-server-count", "-asc", default="1")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", "-q")
    for option in ("--shutdown-timeout", "--host", "--port", "--uds", "--config"):
        parser.add_argument(option)
    for option in ("--moe-backend", "--kernel-config", "--otlp-traces-endpoint"):
        parser.add_argument(option)
    # vLLM also accepts these names with underscores.
    texts = [re.sub("^-[^=]*", lambda name: name[0].replace("_", "-"), text) for text in options]
    return parser.parse_known_args(texts)[0]


def runner_choice() -> dict[str, str]:
    """The variable that makes vLLM use its first model runner; empty where vLLM may choose.

    On GPUs vLLM chooses by model and options, if both runners of its version were vetted. On CPUs
    the second runner is slow: its kernels need Triton, which has no compiler for CPUs. A choice of
    the operator stands.
    """
    installed = vllm_version()
    if has_variable(SECOND_RUNNER) or installed is None:
        return {}
    row = vetting_of(installed)
    second_was_vetted = row is None or "V2" in row.runners
    return {} if second_was_vetted and "cpu" not in installed else {SECOND_RUNNER: "0"}


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
    """A port that no server has now, and that no other call returns in the next minute.

    Systems take the ports of outgoing connections from 32768 on: one of those could be gone when a
    server is started again on its port. Raises OSError if no port is free.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            # The side that closes first keeps the port in TIME_WAIT. A server may bind it then,
            # with SO_REUSEADDR as servers do; the ``bind`` above, which is without it, may not.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.listen(1)
            with socket.create_connection(listener.getsockname()):
                listener.accept()[0].close()
            return port
    raise OSError(f"no port of {PORTS.start}..{PORTS.stop - 1} is free")


@contextmanager
def running_server(
    command: ServerCommand,
    port: int,
    log: Path,
    waiting: Callable[[], None] = lambda: None,
    still_s: float = STILL_S,
) -> Iterator[Server]:
    """Run a server until the context ends, in a process group that ends with it.

    ``waiting`` is called about twice a second during the start. Raises ServerFailed if the server
    ended, or did neither answer nor compute for ``still_s`` seconds.
    """
    argv = (*command.argv, "--host", "127.0.0.1", "--port", str(port))
    process = started(ServerCommand(argv, command.env), log)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _await_health(server, waiting, still_s)
        yield server
    finally:
        stop(process)


def started(command: ServerCommand, log: Path) -> "subprocess.Popen[bytes]":
    """A process in a session of its own; ``stop`` ends it."""
    with log.open("wb") as out:
        return subprocess.Popen(
            command.argv, env=dict(command.env), stdout=out, stderr=out, start_new_session=True
        )


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a server and its children by SIGTERM, and by SIGKILL what runs after ``GRACE_S``."""
    group = process.pid
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
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


def processor_seconds(group: int) -> float:
    """The processor time that the processes of a group, and ended children, have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # After the name, which may have any character, and the state: parent, group, ...
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _await_health(server: Server, waiting: Callable[[], None], still_s: float) -> None:
    moved_at = time.monotonic()
    computed = 0.0
    with httpx.Client(timeout=2.0) as client:
        while True:
            if server.process.poll() is not None:
                raise ServerFailed(_explain(server, f"ended with {server.process.returncode}"))
            # A slow machine may take many minutes; a server that waits for ever computes nothing.
            if (used := processor_seconds(server.process.pid)) > computed + MOVES_S:
                computed, moved_at = used, time.monotonic()
            if time.monotonic() - moved_at > still_s:
                text = f"neither answered nor computed anything for {still_s:.0f} s"
                raise ServerFailed(_explain(server, text))
            with suppress(httpx.TransportError):
                if client.get(f"{server.url}/health").status_code == httpx.codes.OK:
                    return
            waiting()
            time.sleep(0.5)


def _explain(server: Server, what: str) -> str:
    tail = "\n".join(server.log.read_text(errors="replace").splitlines()[-20:])
    return f"the vLLM server {what}; its log is {server.log} and ends with:\n{tail}"
