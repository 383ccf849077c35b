from pathlib import Path

import pytest

from proofserve.models.architectures import ARCHITECTURES
from proofserve.models.writer import ModelSummary, write_model


@pytest.fixture(scope="session", params=sorted(ARCHITECTURES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSummary:
    """One tiny checkpoint of each architecture, written once."""
    arch: str = request.param
    directory: Path = tmp_path_factory.mktemp("models") / arch
    return write_model(directory, arch, "tiny")
