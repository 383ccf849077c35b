"""A node joins a fleet by itself: real HTTP to a small server that plays the fleet."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from proofserve.api.node import status_of
from proofserve.settings.node import NodeSettings
from proofserve.wiring import joining
from proofserve.wiring.joining import joining_of
from proofserve.wiring.node import running_node
from proofserve.wiring.start_checks import start_checks
from support.fake_engine import FakeEngine
from support.pace import until

pytestmark = pytest.mark.anyio

KEY = "joining-key"


@dataclass
class Fleet:
    """A server that answers ``status``, and what nodes posted to it; the node's address too."""

    url: str = ""
    status: int = 200
    refusal: str = '{"detail": "the clock of this node is 40 s behind"}'
    up: bool = True
    looks: int = 0
    posts: list[tuple[str, str | None, Any]] = field(default_factory=list)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    state = Fleet()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.posts.append((self.path, self.headers["Authorization"], body))
            self._answer(state.status, "{}" if state.status < 300 else state.refusal)

        def do_GET(self) -> None:
            state.looks += 1
            assert self.path == "/node/api/v1/pow/health/live"
            self._answer(200 if state.up else 502, "{}")

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        state.url = f"http://127.0.0.1:{server.server_port}"
        yield state
        server.shutdown()


def settings(fleet: Fleet, folder: Path, **changes: Any) -> NodeSettings:
    given: dict[str, Any] = {
        "fleet": f"{fleet.url}/",
        "fleet_key": SecretStr(KEY),
        "fleet_name": "rack-1",
        "fleet_address": f"{fleet.url}/node",
    }
    return NodeSettings(enabled=True, outbox=folder / "outbox.sqlite", **{**given, **changes})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "EVERY_S", 0.05)
    monkeypatch.setattr(joining, "LOOK_S", 0.05)


async def test_a_node_joins_and_shows_that_it_lives(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_node(FakeEngine(), settings(fleet, tmp_path)) as node:
        await until(lambda: len(fleet.posts) > 3)
        address = f"{fleet.url}/node"
        expected = ("/api/v1/fleet/members", f"Bearer {KEY}", {"url": address, "name": "rack-1"})
        assert set(map(repr, fleet.posts)) == {repr(expected)}
        shown = (await status_of(node)).model_dump(mode="json")["fleet"]
        assert 0 <= shown.pop("since_sign_s") < 5
        assert shown == {"fleet": fleet.url, "name": "rack-1", "address": address, "error": None}
    posts = len(fleet.posts)
    joined = [each.message for each in caplog.records if "a member of the fleet" in each.message]
    assert joined == [f"a member of the fleet {fleet.url} as rack-1"]
    assert KEY not in caplog.text
    assert len(fleet.posts) == posts


async def test_a_refusal_is_logged_once_and_shown_and_the_node_serves(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.status = 409
    async with running_node(FakeEngine(), settings(fleet, tmp_path)) as node:
        await until(lambda: len(fleet.posts) > 3)
        shown = (await status_of(node)).model_dump(mode="json")["fleet"]
        assert shown["since_sign_s"] is None
        members = f"{fleet.url}/api/v1/fleet/members"
        assert shown["error"] == f"{members} answers 409: {fleet.refusal}"
        fleet.refusal = "x" * 1_000_000
        fleet.status = 503
        await until(lambda: node.membership().error.endswith(f"503: {'x' * 200}"))  # type: ignore[union-attr]
        fleet.status = 201
        await until(lambda: node.membership().error is None)  # type: ignore[union-attr]
        assert await node.manager.self_check() >= 0
    warned = [each.message for each in caplog.records if "not in the fleet" in each.message]
    assert len(warned) == 2


async def test_a_fleet_that_does_not_answer_keeps_no_node_from_serving(
    fleet: Fleet, tmp_path: Path
) -> None:
    gone = settings(Fleet("http://127.0.0.1:9"), tmp_path, fleet_address=f"{fleet.url}/node")
    async with running_node(FakeEngine(), gone) as node:
        await until(lambda: "cannot be asked" in str(node.membership().error))  # type: ignore[union-attr]
        assert await node.manager.self_check() >= 0


async def test_a_node_joins_once_it_answers_at_its_address(fleet: Fleet, tmp_path: Path) -> None:
    fleet.up = False
    async with running_node(FakeEngine(), settings(fleet, tmp_path)):
        await until(lambda: fleet.looks > 3)
        assert fleet.posts == []
        fleet.up = True
        await until(lambda: len(fleet.posts) > 0)


async def test_a_network_that_does_not_lead_back_is_no_obstacle(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "UP_S", 0.2)
    fleet.up = False
    async with running_node(FakeEngine(), settings(fleet, tmp_path)):
        await until(lambda: len(fleet.posts) > 0)
    assert "does POC_FLEET_ADDRESS lead the fleet to this node?" in caplog.text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fleet_key": None}, "POC_FLEET_KEY"),
        ({"fleet_address": None}, "POC_FLEET_ADDRESS"),
        ({"fleet": "fleet:9100"}, "POC_FLEET must be a URL"),
        ({"fleet": "http://"}, "POC_FLEET must be a URL"),
        ({"fleet": "http://fleet:port"}, "POC_FLEET must be a URL"),
        ({"fleet_address": "ftp://node:8000"}, "POC_FLEET_ADDRESS must be a URL"),
        ({"fleet_address": "http://user:word@node:8000"}, "POC_FLEET_ADDRESS must be a URL"),
        ({"fleet_address": "http://node:8000?a=b"}, "POC_FLEET_ADDRESS must be a URL"),
        ({"enabled": False}, "--poc-fleet needs POC_ENABLED=1"),
    ],
)
def test_a_wrong_setting_is_refused_at_the_start(
    fleet: Fleet, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    chosen = settings(fleet, tmp_path).model_copy(update=changes)
    with pytest.raises(ValueError, match=named) as refused:
        start_checks("model", chosen, [])["fleet"]()
    assert KEY not in str(refused.value)


def test_without_a_fleet_there_is_no_plan_and_the_name_is_the_hosts() -> None:
    assert joining_of(NodeSettings()) is None
    with pytest.raises(ValidationError):
        NodeSettings(fleet_name="")
    given = {"fleet": "http://f:1", "fleet_key": SecretStr(KEY), "fleet_address": "http://n:1"}
    member = joining_of(NodeSettings(**given))
    assert member is not None
    assert member.name
    assert KEY not in repr(member)
