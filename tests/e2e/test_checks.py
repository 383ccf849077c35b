"""``proofserve check`` against real engines: the short form, on the smallest model.

``make checks`` runs the same commands over three models.
"""

from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.cli.servers import ServerOptions
from proofserve_lab.check import command as check_commands
from support.node import IN_ONE_PROCESS, ServedNode

pytestmark = pytest.mark.engine

SHORT = ("--seq-len", "32")


def check(*args: str) -> str:
    result = CliRunner().invoke(app, ["check", *args, *SHORT])
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.output
    return result.output


def test_smoke_of_a_running_server(node: ServedNode) -> None:
    output = check("smoke", "--url", node.server.url)
    assert "16 checks, 0 failed" in output


def test_coexist_of_a_running_server(node: ServedNode) -> None:
    output = check("coexist", "--url", node.server.url)
    assert "11 checks, 0 failed" in output


# A server that goes on with its round after a restart is in test_restarts.py.
@pytest.mark.slow
def test_e2e_serves_a_checkpoint_on_disk_and_restarts_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = partial(ServerOptions, vllm_options=IN_ONE_PROCESS)
    monkeypatch.setattr(check_commands, "ServerOptions", quick)
    output = check("e2e", "--model", str(tiny))
    assert tiny.name in output
    assert "SKIP" not in output
    assert "an honest proof is accepted after a restart" in output
    assert "honest winners are accepted after a restart" in output
    assert "the proof of another checkpoint is fraud" in output
