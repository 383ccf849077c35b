from pathlib import Path

import pytest

from support.models import SmallModels


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SmallModels(tmp_path_factory.mktemp("models")).get("qwen3")
