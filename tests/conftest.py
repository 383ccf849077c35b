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
