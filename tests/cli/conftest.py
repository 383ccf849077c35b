from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.stub_node import stub_node
from proofserve.cli import calibrate, sides
from proofserve.cli.desk import Desk
from proofserve.cli.servers import Deployment
from proofserve.lab.node_client import NodeClient

from . import outbox_files


@pytest.fixture
def deployments(monkeypatch: pytest.MonkeyPatch) -> list[Deployment]:
    """What would have been started; a stub answers instead."""
    started: list[Deployment] = []

    @contextmanager
    def serving(deployment: Deployment, desk: Desk) -> Iterator[NodeClient]:
        started.append(deployment)
        with stub_node() as (_, url), NodeClient(url) as node:
            yield node

    for starter in (calibrate, sides):
        monkeypatch.setattr(starter, "serving", serving)
    return started


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An outbox as a server left it that was stopped."""
    made = tmp_path / "outbox.sqlite"
    outbox_files.fill(made)
    return made
