"""What every test may use."""

from pathlib import Path

import pytest

from support.models import SmallModels


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return SmallModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny(small_models: SmallModels) -> Path:
    return small_models.get("qwen3")


# First: xdist looks at the marks in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run side by side share what is costly: the node for all, or that of their file."""
    for item in items:
        file = item.nodeid.partition("::")[0]
        shared = "served-node" if "node" in getattr(item, "fixturenames", ()) else file
        item.add_marker(pytest.mark.xdist_group(shared))
