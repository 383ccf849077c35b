"""A deployment in which one rank has another proofserve, or none."""

import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from starlette.datastructures import State

import proofserve
from proofserve.engines.vetting.start import require_equal_ranks
from proofserve.plugin.endpoint import ProofEndpoints
from proofserve.rounds.errors import EngineFault
from support.engines import EmbeddedEngine

# vLLM gives its workers the methods of this class.
EXTENSION = {"worker_extension_cls": "support.ranks.WorkerExtension"}
MISSING = ""
ONE_MORE_LINE = "# one more line\n"


class WorkerExtension:
    rank: int

    def change_package(self, rank: int, folder: str) -> None:
        """Let ``rank`` have the package in ``folder``, or none if it is MISSING."""
        if self.rank == rank:
            proofserve.__path__ = [folder]
            # With None an import of that name fails.
            there = None if folder == MISSING else proofserve
            sys.modules["proofserve"] = there  # type: ignore[assignment]


def changed_copy(folder: Path) -> Path:
    """A copy of the package in which one file has one more line."""
    copy = shutil.copytree(
        Path(proofserve.__path__[0]), folder / "proofserve", ignore=shutil.ignore_patterns("*.pyc")
    )
    changed = copy / "protocol" / "draws.py"
    changed.write_text(changed.read_text() + ONE_MORE_LINE)
    return copy


def refuses_other_ranks(engine: EmbeddedEngine, folder: Path) -> None:
    """The start of a server fails while one of its ranks has another package, or none."""
    own = Path(proofserve.__path__[0])

    def change(rank: int, package: object) -> None:
        engine.run(engine.llm.collective_rpc("change_package", args=(rank, str(package))))

    assert "on every rank" in engine.run(require_equal_ranks(engine.llm))[0]
    change(1, changed_copy(folder))
    with pytest.raises(EngineFault, match=r"rank 1 on host \S+ has proofserve .* this server"):
        engine.run(start_of_a_server(engine))
    change(1, MISSING)
    with pytest.raises(EngineFault, match=r"rank 1 on host \S+ has no proofserve") as refused:
        engine.run(start_of_a_server(engine))
    assert "rank 0" not in str(refused.value)
    change(1, own)
    assert "on every rank" in engine.run(require_equal_ranks(engine.llm))[0]


async def start_of_a_server(engine: EmbeddedEngine) -> None:
    """What vLLM's server calls once its engine runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POC_ENABLED", "1")
        plugin = ProofEndpoints()
    args = Namespace(host="127.0.0.1", uds=None, served_model_name=["tiny"], model="tiny")
    await plugin.init_state(engine.llm, State(), args)
