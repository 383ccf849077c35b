"""What every test may use."""

import os
import random
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkstemp
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from support.models import SmallModels

# Files that use one start of an engine, and which.
SHARED_ENGINE = {
    "tests/e2e/test_checks.py": "the served node",
    "tests/e2e/test_clients.py": "the served node",
    "tests/e2e/test_dashboard.py": "the served node",
    "tests/e2e/test_distance.py": "the served node",
    "tests/e2e/test_endurance.py": "the served node",
    "tests/e2e/test_exact.py": "the served node",
    "tests/e2e/test_fleet.py": "the served node",
    "tests/e2e/test_gpu.py": "the served node",
    "tests/e2e/test_liveness.py": "the served node",
    "tests/e2e/test_probe.py": "the served node",
    "tests/e2e/test_rounds.py": "the served node",
    "tests/e2e/test_shutdown.py": "the served node",
    "tests/e2e/test_sketch.py": "the served node",
    "tests/e2e/test_watching.py": "the served node",
    "tests/embedded_engine/test_embedded.py": "the embedded engine",
    "tests/embedded_engine/test_receipts.py": "the embedded engine",
    "tests/embedded_engine/test_second_runner.py": "the embedded engine",
    "tests/embedded_engine/test_shapes.py": "the embedded engine",
    "tests/embedded_engine/test_sync.py": "the embedded engine",
}

# The longest come first, so that the processes of a run end together. Where a file has one or two
# tests, its process takes the next file as well.
LONGEST = (
    "the served node",
    "the embedded engine",
    "tests/e2e/test_roles.py",
    "tests/e2e/test_parallel.py",
    "tests/lab/test_demo.py",
    "tests/trials/test_fleet.py",
    "tests/e2e/test_restarts.py",
    "tests/e2e/test_gateway.py",
    "tests/verifier/chat/test_checker.py",
    "tests/cli/chat/test_probe.py",
    "tests/cli/test_validate.py",
    "tests/lab/test_demo_verdicts.py",
    "tests/cli/test_by_nodes.py",
    "tests/cli/test_verify.py",
    "tests/cli/test_audit.py",
    "tests/gpu_host/test_run.py",
)
FAST_IMPORTS = Path(__file__).parent / "support" / "fast_imports"
TOOLS = Path(__file__).parents[1] / "tools"


# Property tests run on shared machines.
settings.register_profile("no deadlines", deadline=None)
settings.load_profile("no deadlines")


def pytest_configure() -> None:
    """Processes of tests import quickly, those of pytest-xdist too: see ``FAST_IMPORTS``."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(FAST_IMPORTS) not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(FAST_IMPORTS), str(TOOLS), *path))
        )
    os.environ["PROOFSERVE_TEST_FORKS"] = "1"
    # Of this process and of the servers that it starts.
    os.environ["PROOFSERVE_TEST_FAULTS"] = mkstemp(prefix="faults-")[1]


def pytest_unconfigure() -> None:
    Path(os.environ["PROOFSERVE_TEST_FAULTS"]).unlink(missing_ok=True)


@pytest.fixture(scope="session")
def _watched() -> None:
    import described

    described.watch()


@pytest.fixture(autouse=True)
def _as_described(_watched: None) -> Iterator[None]:
    """No server of ours has answered, or stored, what docs/api does not describe."""
    yield
    file = Path(os.environ["PROOFSERVE_TEST_FAULTS"])
    if file.stat().st_size:
        faults = file.read_text()
        file.write_text("")
        pytest.fail(faults, pytrace=False)


def group_of(nodeid: str) -> str:
    """Tests of a file share its engine in one process; so do files that share an engine."""
    file = nodeid.partition("::")[0]
    return SHARED_ENGINE.get(file, file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {group: number for number, group in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(group_of(item.nodeid), len(LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class SharingEngines(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return SharingEngines(config, log)


@pytest.fixture(autouse=True)
def same_draws(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test draws the same in each run: numbers, samples of a verdict, blocks of a challenge.

    A verdict is wrong with a small chance. Many tests, run often, would meet it.
    """
    drawn = random.Random(request.node.nodeid)
    monkeypatch.setattr(secrets, "token_hex", lambda size=32: drawn.randbytes(size).hex())
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> "SmallModels":
    # It imports torch and transformers, and the process that hands out the tests needs neither.
    from support.models import SmallModels

    return SmallModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny(small_models: "SmallModels") -> Path:
    return small_models.get("qwen3")


@pytest.fixture
def few_kernels() -> Iterator[None]:
    """For a test of a verdict to which it is the same how many kernels and suspects there are."""
    from support.small_bank import small_bank

    with small_bank():
        yield


@pytest.fixture
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers start their engine's processes as vLLM's platform chooses: see ``FAST_IMPORTS``."""
    monkeypatch.delenv("PROOFSERVE_TEST_FORKS")


@pytest.fixture
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that starts here leaves Python's collector alone.

    It would look through all that the tests have imported, for a quarter of a second.
    """
    from proofserve.gateway import app

    nothing = SimpleNamespace(collect=int, freeze=int, unfreeze=int)
    monkeypatch.setattr(app, "gc", nothing)
