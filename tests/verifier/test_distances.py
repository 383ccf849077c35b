import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import pytest

from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import DistanceWork, Judgement
from proofserve.reports import NodeError, Progress
from proofserve.rounds.records import Winner
from proofserve.verifier.target import LAYER_HOOKS, SIGN_FLIPS, Sample, collect
from support.stub_node import Habits, stub_node

SAMPLE = Sample(nonces=20, blocks=2, keys=3, seq_len=8, batch_size=5)


class Listener(NodeClient):
    """Notes what is ordered and judged."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.orders: list[DistanceWork] = []
        self.calls: list[tuple[str, str, list[int]]] = []

    def judging(self, work: DistanceWork) -> AbstractContextManager[None]:
        self.orders.append(work)
        return super().judging(work)

    def judge(self, work: DistanceWork, winners: Sequence[Winner]) -> Judgement:
        nonces = [winner.nonce for winner in winners]
        self.calls.append((work.block_hash, work.public_key, nonces))
        return super().judge(work, winners)


class Counter:
    """Counts what a person would see."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int | None]] = []
        self.done = 0

    def step(self, text: str, total: int | None = None) -> None:
        self.steps.append((text, total))

    def advance(self) -> None:
        self.done += 1


def test_nonces_are_shared_evenly_and_rounded_up() -> None:
    assert (SAMPLE.per_key, SAMPLE.per_block, SAMPLE.total) == (7, 21, 42)
    assert SAMPLE.shape == (2, 3, 7)


@pytest.mark.parametrize(
    ("method", "sign_flips", "layer_hooks"), [(SIGN_FLIPS, True, False), (LAYER_HOOKS, False, True)]
)
def test_a_method_is_one_of_the_two_options_and_not_the_other(
    method: str, sign_flips: bool, layer_hooks: bool
) -> None:
    with stub_node() as (_, url), Listener(url) as node:
        collect(node, "stub", method, SAMPLE, Progress())
    assert len(node.orders) == 2
    assert len({order.block_hash for order in node.orders}) == 2
    for order in node.orders:
        assert (order.sign_flips, order.layer_hooks) == (sign_flips, layer_hooks)
        assert (order.seq_len, order.batch_size, order.r_target) == (8, 5, 2.0)


def test_every_nonce_of_every_block_and_key_has_its_place() -> None:
    with stub_node() as (stub, url), Listener(url) as node:
        distances = collect(node, "stub", SIGN_FLIPS, SAMPLE, Progress())
        assert distances.shape == (2, 3, 7)
        for b, order in enumerate(node.orders):
            for k in range(3):
                work = {**order.body, "public_key": f"calibration-key-{k}"}
                assert distances[b, k].tolist() == [stub.distance(n, work) for n in range(7)]
    assert len(set(distances.ravel().tolist())) == distances.size
    assert [nonces for *_, nonces in node.calls] == [[0, 1, 2, 3, 4], [5, 6]] * 6


def test_the_node_ends_up_stopped_with_nothing_stored() -> None:
    with stub_node() as (stub, url), NodeClient(url) as node:
        collect(node, "stub", LAYER_HOOKS, SAMPLE, Progress())
        assert (stub.state, stub.rows) == ("STOPPED", [])


def test_a_person_sees_every_call() -> None:
    counter = Counter()
    with stub_node() as (_, url), NodeClient(url) as node:
        collect(node, "stub", SIGN_FLIPS, SAMPLE, counter)
    assert counter.steps == [("stub: 42 nonces with sign flips", 12)]
    assert counter.done == 12


def test_a_round_that_generates_is_left_alone() -> None:
    with stub_node() as (stub, url), NodeClient(url) as node:
        node.start_round(DistanceWork("stub"))
        with pytest.raises(NodeError, match="409"):
            collect(node, "stub", SIGN_FLIPS, SAMPLE, Progress())
        assert stub.state == "GENERATING"


def test_a_gap_is_an_error() -> None:
    with (
        stub_node(Habits(forgets=True)) as (_, url),
        NodeClient(url) as node,
        pytest.raises(NodeError, match="4 of 5"),
    ):
        collect(node, "stub", SIGN_FLIPS, SAMPLE, Progress())


def test_a_distance_that_is_not_a_number_is_an_error() -> None:
    class Confused(NodeClient):
        def judge(self, work: DistanceWork, winners: Sequence[Winner]) -> Judgement:
            computed = super().judge(work, winners).computed_distances
            return Judgement((*computed[:-1], math.nan), 0, 1.0, False)

    with stub_node() as (stub, url), Confused(url) as node:
        with pytest.raises(NodeError, match="not a number"):
            collect(node, "stub", SIGN_FLIPS, SAMPLE, Progress())
        assert stub.state == "STOPPED"
