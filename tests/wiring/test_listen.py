"""A port is bound before the server starts, and one in use is told in one line."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from proofserve.wiring.sockets import bound_sockets
from support.pace import PACE

PROOFSERVE = Path(sys.executable).with_name("proofserve")


def test_every_address_of_a_host_is_bound() -> None:
    for host, family in (("127.0.0.1", socket.AF_INET), ("0.0.0.0", socket.AF_INET)):  # noqa: S104
        (one,) = bound_sockets(host, 0)
        with one:
            assert one.family == family
            assert one.getsockname()[1] > 0
            # It does not accept connections yet.
            with socket.socket() as client, pytest.raises(ConnectionRefusedError):
                client.connect(("127.0.0.1", one.getsockname()[1]))


def test_a_host_that_is_none_of_ours_is_named() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192.0.2.1, port 7000: Cannot assign"):
        bound_sockets("192.0.2.1", 7000)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_in_use_is_one_line_and_an_exit_code(workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        argv = ("gateway", "--host", "127.0.0.1", "--port", port, "--gateway-workers", workers)
        done = subprocess.run(
            [PROOFSERVE, *argv], capture_output=True, text=True, timeout=60 * PACE, check=False
        )
    assert done.returncode == 3
    (line,) = (done.stdout + done.stderr).splitlines()
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in line
    assert "--port / VLLM_PORT" in line


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_port_is_bound_before_the_application_starts(workers: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        argv = ("gateway", "--host", "127.0.0.1", "--port", "0", "--gateway-workers", workers)
        process = subprocess.Popen([PROOFSERVE, *argv], stdout=file, stderr=file)
    try:
        for _ in range(600):
            if "startup complete" in log.read_text():
                break
            assert process.poll() is None, log.read_text()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
    finally:
        process.terminate()
        assert process.wait(60) == 0
    bound, _, _ = log.read_text().partition("startup complete")
    assert "The gateway listens on http://127.0.0.1:" in bound
