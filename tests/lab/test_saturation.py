import pytest

from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve.reports import Progress
from proofserve_lab.bench import chat as module
from proofserve_lab.bench.chat import Load, Saturation, measure_saturation
from support.stub_node import Habits, stub_node

# Long enough that a busy machine leaves the stub no idle moment between two of them.
LOAD = Load(clients=4, words=1000, window_s=0.5, pairs=2)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.2)
    # Two windows of the stub do not tell what is usual.
    monkeypatch.setattr(module, "STALL", 1_000.0)


def test_the_ratio_is_that_of_the_means() -> None:
    found = Saturation(plain=[100.0, 50.0, 60.0], beside_round=[98.0, 49.0, 58.8])
    assert found.throughput_ratio == pytest.approx(0.98)
    # The median would not see this one.
    found.beside_round[2] = 28.8
    assert found.throughput_ratio == pytest.approx(175.8 / 210)


def test_without_windows_there_is_no_ratio() -> None:
    assert Saturation(plain=[100.0]).throughput_ratio is None


def test_a_polite_node_stores_nothing_under_load_and_resumes() -> None:
    with stub_node() as (_, url), NodeClient(url) as node:
        found = measure_saturation(node, Work("stub"), LOAD, Progress())
    assert len(found.plain) == len(found.beside_round) == len(found.chat_share) == 2
    assert found.proofs_while_saturated == 0
    assert found.proofs_afterwards > 0
    assert found.errors == []
    # Four clients at 5000 tokens/s each, less what the stub's HTTP takes; a chat that crosses an
    # edge of so short a window counts as a whole or not at all. A window in which the machine
    # stood still says nothing.
    assert any(4_000 < rate < 30_000 for rate in found.plain), found.plain


def test_a_node_that_does_not_give_way_is_found_out() -> None:
    with stub_node(Habits(polite=False)) as (_, url), NodeClient(url) as node:
        found = measure_saturation(node, Work("stub"), LOAD, Progress())
    assert found.proofs_while_saturated > 100
