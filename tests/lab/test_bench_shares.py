"""``proofserve bench chat-priority --share`` as a user runs it, on stub servers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli import servers
from proofserve.cli.main import app
from proofserve.cli.servers import ServerOptions
from proofserve.remote.node_client import NodeClient
from proofserve_lab.bench import share as module
from support.stub_node import Habits, stub_node


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", "chat-priority", *args])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServerOptions]:
    """The options of each server that was started; each keeps half of its share only."""
    found: list[ServerOptions] = []

    @contextmanager
    def serving(deployment: ServerOptions, _session: object) -> Iterator[NodeClient]:
        found.append(deployment)
        habits = Habits(share=deployment.share / 2, loss=deployment.share)
        with stub_node(habits) as (_, url), NodeClient(url) as node:
            yield node

    monkeypatch.setattr(servers, "serving", serving)
    monkeypatch.setattr(module, "SETTLE_S", 0.1)
    monkeypatch.setattr(module, "SPREAD_S", 0.1)
    # Windows this short tell the instant of an answer only roughly.
    monkeypatch.setattr(module, "IDLE", 0.5)
    return found


def test_each_share_has_a_server_of_its_own(started: list[ServerOptions], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ("--clients", "4", "--pairs", "1", "--seconds", "2", "--json", str(file))
    result = run("--share", "0.4", "--share", "0.8", *options)
    assert result.exit_code == 1, result.output
    assert [each.share for each in started] == [0.4, 0.8]
    read = json.loads(file.read_text())
    assert read["proof_share_0.4"] == pytest.approx(0.2, abs=0.1)
    assert {"share_error_0.4", "share_error_0.8"} <= set(read["failed"])
    assert read["setup"]["load"]["clients"] == 4
    assert "chat_loss_0.8" in result.output


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--url", "http://127.0.0.1:9"), "Leave out --url"),
        (("--chats", "5"), "--chats"),
        (("--model", "mine"), "--model"),
    ],
)
def test_an_option_that_share_cannot_keep_is_refused(
    args: tuple[str, ...], reason: str, started: list[ServerOptions]
) -> None:
    result = run("--share", "0.1", *args)
    assert result.exit_code == 2
    assert reason in " ".join(result.output.replace("│", " ").split())
    assert started == []


@pytest.mark.parametrize("share", ["0", "0.95", "nan"])
def test_a_share_that_no_server_takes_is_refused(share: str, started: list[ServerOptions]) -> None:
    assert run("--share", share).exit_code == 2
    assert started == []
