"""What every test may use."""

import os
from pathlib import Path
from typing import Any

import pytest

from support.models import SmallModels

# Files that use one start of an engine, and which.
SHARED_ENGINE = {
    "tests/e2e/test_checks.py": "the served node",
    "tests/e2e/test_distance.py": "the served node",
    "tests/e2e/test_endurance.py": "the served node",
    "tests/e2e/test_gpu.py": "the served node",
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

FAST_IMPORTS = Path(__file__).parent / "support" / "fast_imports"


def pytest_configure() -> None:
    """Processes of tests import quickly, those of pytest-xdist too: see ``FAST_IMPORTS``."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(FAST_IMPORTS) not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(FAST_IMPORTS), *path)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file share its engine in one process; so do files that share an engine."""
    from xdist.scheduler import LoadFileScheduling

    class SharingEngines(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return SHARED_ENGINE.get(file, file)

    return SharingEngines(config, log)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return SmallModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny(small_models: SmallModels) -> Path:
    return small_models.get("qwen3")
