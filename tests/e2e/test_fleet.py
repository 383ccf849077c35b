"""A fleet of two real servers: what checks a node checks the fleet, and finds nothing."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.wiring.launch import free_port
from support.controllers import controller
from support.node import ServedNode, until

pytestmark = pytest.mark.engine

SHORT = ("--seq-len", "32")
# Engines of a busy machine are slow, not lost.
PATIENT = ("--look-sec", "20", "--lost-after-sec", "120")


@pytest.fixture(scope="module")
def fleet(
    served: ServedNode, measured: ServedNode, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fleet")
    url = f"http://127.0.0.1:{free_port()}"
    members = (served.server.url, measured.server.url)
    options = [each for member in members for each in ("--member", member)]
    with controller(folder, url, *options, *PATIENT):
        until(lambda: ready_of(url) == 2, 120)
        yield url
    for member in (served, measured):
        member.stop()


def ready_of(url: str) -> int:
    try:
        return int(snapshot(url)["fleet"]["members"]["ready"])
    except httpx.TransportError:
        return 0


def snapshot(url: str) -> Any:
    return httpx.get(f"{url}/api/v1/fleet/snapshot", timeout=30).json()


def check(*args: str) -> str:
    result = CliRunner().invoke(app, ["check", *args, *SHORT])
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.output
    return result.output


def test_smoke_of_a_fleet(fleet: str) -> None:
    output = check("smoke", "--url", fleet)
    assert "16 checks, 0 failed" in output
    assert "SKIP  chat answers" in output
    # Both servers have proved: the round has nonces of two lanes.
    assert all(each["processed"] > 0 for each in snapshot(fleet)["members"])


def test_e2e_of_a_fleet(fleet: str) -> None:
    output = check("e2e", "--url", fleet)
    assert "an honest proof is accepted on the same server" in output
    assert "honest winners are accepted on the same server" in output
