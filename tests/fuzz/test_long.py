"""`make fuzz`: thousands of requests at a real node and a real gateway, and every hostile body."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz.claimed import convicted
from fuzz.doors import doors_of_gateway, doors_of_node
from fuzz.drawn import Seen, draw
from fuzz.gateways import real_gateway
from fuzz.nodes import real_node
from fuzz.storm import storm
from fuzz.targets import Target
from gateway.scripted import Backend
from support.node import DISTANCE_ROUND, ROUND

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(3600)]
CASES = 2000
# Of a refusal, at a server that has nothing else to do.
REFUSED_WITHIN_S = 0.1


@pytest.fixture(scope="module")
def node(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with real_node(tiny, tmp_path_factory.mktemp("node")) as target:
        yield target


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Target, list[Backend]]]:
    with real_gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running


def show(seen: Seen) -> None:
    statuses = Counter[int]()
    for (_, status), count in seen.items():
        statuses[status] += count
    operations = len({label for label, _ in seen})
    print(f"{seen.total()} cases at {operations} operations: {dict(sorted(statuses.items()))}")


def test_a_node_answers_as_its_page_says(node: Target) -> None:
    seen = draw(node, CASES, same_every_time=False)
    show(seen)
    assert seen.total() >= CASES
    node.is_sound()


def test_a_gateway_answers_as_its_page_says(gateway: tuple[Target, list[Backend]]) -> None:
    seen = draw(gateway[0], CASES, same_every_time=False)
    show(seen)
    assert seen.total() >= CASES
    gateway[0].is_sound()


def test_a_node_refuses_what_is_hostile_at_once(node: Target) -> None:
    node.is_sound()
    storm(node.port, doors_of_node(ROUND, DISTANCE_ROUND), REFUSED_WITHIN_S)
    node.is_sound()


def test_a_node_convicts_who_claims_garbage(node: Target) -> None:
    node.is_sound()
    took = convicted(node.url, ROUND)
    print(f"{len(took)} verdicts, the slowest in {1e3 * max(took.values()):.1f} ms")
    assert max(took.values()) < REFUSED_WITHIN_S


def test_a_gateway_refuses_what_is_hostile_at_once(
    gateway: tuple[Target, list[Backend]],
) -> None:
    target, backends = gateway
    target.is_sound()
    before = [len(backend.calls) for backend in backends]
    storm(target.port, doors_of_gateway(backends[1].url), REFUSED_WITHIN_S)
    assert [len(backend.calls) for backend in backends] == before
    target.is_sound()
