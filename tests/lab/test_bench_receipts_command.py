"""``proofserve bench receipts`` as a user runs it, on stub servers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proofserve.cli import servers
from proofserve.cli.main import app
from proofserve.cli.servers import ServerOptions
from proofserve.remote.node_client import NodeClient
from support.stub_node import Habits, stub_node


def test_two_servers_run_at_once_and_one_keeps_receipts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[ServerOptions] = []
    most: list[list[bool]] = []

    @contextmanager
    def serving(deployment: ServerOptions, _session: object) -> Iterator[NodeClient]:
        running.append(deployment)
        most.append([each.receipts for each in running])
        with stub_node(Habits(receipts=deployment.receipts)) as (_, url), NodeClient(url) as node:
            yield node
        running.remove(deployment)

    monkeypatch.setattr(servers, "serving", serving)
    file = tmp_path / "figures.json"
    options = ("--clients", "2", "--pairs", "1", "--chats", "4", "--compared", "2")
    command = ["bench", "receipts", *options, "--max-tokens", "8", "--json", str(file)]
    result = CliRunner().invoke(app, command)
    assert most == [[False], [False, True]]
    read = json.loads(file.read_text())
    # A turn this short does not tell one speed from another.
    assert set(read["failed"]) <= {"throughput_ratio"}
    assert result.exit_code == (1 if read["failed"] else 0), result.output
    assert (read["chats"], read["differing"], read["missing"]) == (2, 0, 0)
    assert read["setup"]["least_ratio"] == 0.97
    assert "tokens_per_second_on" in result.output
