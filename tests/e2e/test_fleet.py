"""A fleet of two real servers: what checks a node checks the fleet, and finds nothing.

With one controller on SQLite, and with two on PostgreSQL through the one that does not lead.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from endurance.fleet.postgres import NoPostgres, postgres
from proofserve.cli.main import app
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve.wiring.launch import free_port
from support.controllers import controller
from support.node import NAME, ServedNode, until

pytestmark = pytest.mark.engine

SHORT = ("--seq-len", "32")
# Engines of a busy machine are slow, not lost.
PATIENT = ("--look-sec", "20", "--lost-after-sec", "120")


@pytest.fixture(scope="module")
def members(served: ServedNode, measured: ServedNode) -> Iterator[list[str]]:
    """The options that name both servers."""
    urls = (served.server.url, measured.server.url)
    yield [each for url in urls for each in ("--member", url)]
    for member in (served, measured):
        member.stop()


@pytest.fixture
def fleet(members: list[str], tmp_path: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{free_port()}"
    with controller(tmp_path, url, *members, *PATIENT):
        until(lambda: ready_of(url) == 2, 120)
        yield url


@pytest.fixture
def second_controller(members: list[str], tmp_path: Path) -> Iterator[str]:
    """The URL of one of two controllers on one PostgreSQL; the other one leads."""
    first, second = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with ExitStack() as running:
        try:
            database = running.enter_context(postgres()).database()
        except NoPostgres as error:
            pytest.skip(f"no PostgreSQL can be started here: {error}")
        for url in (first, second):
            options = (*members, *PATIENT, "--database", database, "--public-url", first)
            running.enter_context(controller(tmp_path, url, *options))
            until(lambda url=url: ready_of(url) == 2, 120)
        assert leads(first)
        assert not leads(second)
        yield second


def ready_of(url: str) -> int:
    try:
        return int(snapshot(url)["fleet"]["members"]["ready"])
    except httpx.TransportError:
        return 0


def leads(url: str) -> bool:
    text = httpx.get(f"{url}/api/v1/fleet/metrics", timeout=30).text
    return "proofserve_fleet_leads 1.0" in text


def snapshot(url: str) -> Any:
    return httpx.get(f"{url}/api/v1/fleet/snapshot", timeout=30).json()


def processed_of(url: str) -> list[int]:
    return [each["processed"] for each in snapshot(url)["members"]]


def steps_of(url: str) -> list[int | None]:
    """What their engines have computed."""
    return [each["steps"] for each in snapshot(url)["members"]]


def check(*args: str) -> str:
    result = CliRunner().invoke(app, ["check", *args, *SHORT])
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.output
    return result.output


def test_smoke_of_a_fleet(fleet: str) -> None:
    output = check("smoke", "--url", fleet)
    assert "16 checks, 0 failed" in output
    assert "SKIP  chat answers" in output
    # Both servers prove: a round has nonces of two lanes.
    with NodeClient(fleet) as node, node.round(Work(NAME, seq_len=32)):
        until(
            lambda: all(processed_of(fleet)), reached=lambda: (steps_of(fleet), processed_of(fleet))
        )


def test_e2e_of_a_fleet(second_controller: str) -> None:
    output = check("e2e", "--url", second_controller)
    assert "an honest proof is accepted on the same server" in output
    assert "honest winners are accepted on the same server" in output
