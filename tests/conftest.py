"""What every test may use. Real engines are started once per session: a start costs half a minute."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import SmallModels


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallModels]:
    yield SmallModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny(small_models: SmallModels) -> Path:
    return small_models.get("qwen3")
