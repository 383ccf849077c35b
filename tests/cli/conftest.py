from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proofserve.cli import servers
from proofserve.cli.main import app
from proofserve.cli.servers import ServerOptions
from proofserve.cli.session import CommandSession
from proofserve.remote.node_client import NodeClient
from support.four_bits import one_thread
from support.small_bank import small_bank
from support.stub_node import stub_node

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

    monkeypatch.setattr(servers, "serving", serving)
    return started


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An outbox as a stopped server leaves it."""
    made = tmp_path / "outbox.sqlite"
    outbox_files.fill(made)
    return made


@pytest.fixture(scope="session")
def of_tiny(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The tiny model and its calibration of sketches: the emulated kernels of a small bank."""
    file = tmp_path_factory.mktemp("calibration") / "calibration.json"
    shape = ("--scheme", "sketch-v1", "--seq-len", "32")
    few = ("--nonces", "32", "--emulated", "32", "--bank", "24", "--verifications", "100")
    with one_thread(), small_bank():
        options = ["calibrate", "noise", str(tiny), *shape, *few, "--out", str(file)]
        result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    return "--model", str(tiny), "--calibration", str(file)
