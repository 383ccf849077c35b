from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.stub_node import stub_node
from proofserve.cli import recompute, servers
from proofserve.cli.servers import ServerOptions
from proofserve.cli.session import CommandSession
from proofserve.lab.node_client import NodeClient

from . import outbox_files


@pytest.fixture
def deployments(monkeypatch: pytest.MonkeyPatch) -> list[ServerOptions]:
    """The servers that a command would start; a stub answers instead."""
    started: list[ServerOptions] = []

    @contextmanager
    def serving(deployment: ServerOptions, session: CommandSession) -> Iterator[NodeClient]:
        started.append(deployment)
        with stub_node() as (_, url), NodeClient(url) as node:
            yield node

    for starter in (servers, recompute):
        monkeypatch.setattr(starter, "serving", serving)
    return started


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An outbox as a stopped server leaves it."""
    made = tmp_path / "outbox.sqlite"
    outbox_files.fill(made)
    return made
