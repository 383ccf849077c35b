"""One served node for all tests that need no other; each test leaves it without a round."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.node import ServedNode, serve


@pytest.fixture(scope="session")
def served(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    with serve(tiny, tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture
def node(served: ServedNode) -> Iterator[ServedNode]:
    yield served
    served.stop()
