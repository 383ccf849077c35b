"""A small part of `make fuzz`, on a node of toy numbers and the real gateway."""

from collections.abc import Iterator

import pytest

from api.distance_bodies import ROUND as DISTANCE
from api.support import ORDER
from fuzz.claimed import convicted
from fuzz.doors import doors_of_gateway, doors_of_node
from fuzz.drawn import draw
from fuzz.gateways import real_gateway
from fuzz.nodes import toy_node
from fuzz.storm import storm
from fuzz.targets import Target
from gateway.scripted import Backend

CASES = 50
ALONE = {**ORDER, "node_id": 0, "node_count": 1}
NODE_DOORS = doors_of_node(ALONE, DISTANCE)


@pytest.fixture
def node(caplog: pytest.LogCaptureFixture) -> Iterator[Target]:
    with toy_node(lambda: caplog.text) as target:
        yield target
        target.is_sound()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Target, list[Backend]]]:
    with real_gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running
        running[0].is_sound()


def test_a_node_answers_as_its_page_says(node: Target) -> None:
    seen = draw(node, CASES, same_every_time=True)
    assert seen.total() >= CASES


def test_a_gateway_answers_as_its_page_says(gateway: tuple[Target, list[Backend]]) -> None:
    seen = draw(gateway[0], CASES, same_every_time=True)
    assert seen.total() >= CASES


def test_a_node_refuses_what_is_hostile(node: Target) -> None:
    storm(node.port, NODE_DOORS[:2])


def test_a_node_convicts_who_claims_garbage(node: Target) -> None:
    convicted(node.url, ALONE)


def test_a_gateway_refuses_what_is_hostile(gateway: tuple[Target, list[Backend]]) -> None:
    target, backends = gateway
    doors = doors_of_gateway(backends[1].url)
    before = [len(backend.calls) for backend in backends]
    storm(target.port, [doors[0], doors[-1]])
    # None of it was passed on.
    assert [len(backend.calls) for backend in backends] == before
