"""What every test may use."""

from pathlib import Path

import pytest

from support.models import SmallModels


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file share its engine, and those of the served node share one start of it.

    Each such group runs in one process (xdist's --dist loadgroup).
    """
    for item in items:
        uses = getattr(item, "fixturenames", ())
        group = "served" if "served" in uses else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return SmallModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny(small_models: SmallModels) -> Path:
    return small_models.get("qwen3")
