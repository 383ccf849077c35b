"""What every test may use."""

from pathlib import Path

import pytest

from support.models import SmallModels


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A group runs in one process, and shares what was started there (xdist's --dist loadgroup).

    Every file is one, unless it says that it shares an engine with others.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return SmallModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny(small_models: SmallModels) -> Path:
    return small_models.get("qwen3")
