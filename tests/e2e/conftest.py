"""One served node for all tests that need no other; each test leaves it without a round."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.node import ServedNode, serve

# Seconds after which the served node reports a hang; by default a minute.
STALL_S = 4.0


@pytest.fixture(scope="session")
def served(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    folder = tmp_path_factory.mktemp("served")
    with serve(tiny, folder, POC_ENGINE_STALL_SEC=str(STALL_S), POC_DASHBOARD="1") as running:
        yield running


@pytest.fixture
def node(served: ServedNode) -> Iterator[ServedNode]:
    yield served
    served.stop()
