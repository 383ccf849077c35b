"""Served nodes for all tests that need no other."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.collector import Collector, collecting
from support.gateway import TOOLS
from support.node import ServedNode, serve

# Seconds after which the served node reports a hang; by default a minute.
STALL_S = 4.0


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """It gets the spans of the served node."""
    with collecting() as made:
        yield made


@pytest.fixture(scope="session")
def served(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[ServedNode]:
    folder = tmp_path_factory.mktemp("served")
    options = ("--otlp-traces-endpoint", collector.url, *TOOLS)
    variables = {
        "POC_ENGINE_STALL_SEC": str(STALL_S),
        "POC_DASHBOARD": "1",
        "POC_RECEIPTS": "1",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    with serve(tiny, folder, options, **variables) as running:
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
