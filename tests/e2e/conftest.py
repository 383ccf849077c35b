"""Served nodes for all tests that need no other."""

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
    """Each test leaves it without a round."""
    yield served
    served.stop()


@pytest.fixture(scope="session")
def measured(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    """A node that takes measurements, proves beside chat, and lets short chats finish at its end.

    It is a member of a fleet in ``test_fleet.py``, ``test_gpu.py`` measures it, and
    ``test_shutdown.py`` ends it.
    """
    folder = tmp_path_factory.mktemp("measured")
    options = ("--scheduling-policy", "priority", "--shutdown-timeout", "6")
    with serve(tiny, folder, options, POC_MEASURE="1", POC_SHARE="0.3") as running:
        yield running
