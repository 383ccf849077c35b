"""A small part of `make fuzz`, with a node whose engine is a toy and the real gateway."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from api.distance_bodies import ROUND as DISTANCE
from api.support import ORDER
from fuzz.fleets import ROUTES as FLEET_ROUTES
from fuzz.fleets import toy_fleet
from fuzz.garbage_claims import seconds_to_convict
from fuzz.gateways import real_gateway
from fuzz.generated import send_generated
from fuzz.nodes import toy_node
from fuzz.routes import gateway_routes, node_routes
from fuzz.send_hostile import send_hostile
from fuzz.targets import Target
from gateway.scripted import Backend

CASES = 50
ORDER_OF_ONE_NODE = {**ORDER, "node_id": 0, "node_count": 1}
NODE_ROUTES = node_routes(ORDER_OF_ONE_NODE, DISTANCE)


@pytest.fixture
def node(caplog: pytest.LogCaptureFixture) -> Iterator[Target]:
    with toy_node(lambda: caplog.text) as target:
        yield target
        target.assert_sound()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Target, list[Backend]]]:
    with real_gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running
        running[0].assert_sound()


def test_the_node_answers_as_its_openapi_page_says(node: Target) -> None:
    seen = send_generated(node, CASES, derandomize=True)
    assert seen.total() >= CASES


def test_the_gateway_answers_as_its_openapi_page_says(
    gateway: tuple[Target, list[Backend]],
) -> None:
    seen = send_generated(gateway[0], CASES, derandomize=True)
    assert seen.total() >= CASES


@pytest.fixture
def fleet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Target]:
    with toy_fleet(tmp_path, lambda: caplog.text) as target:
        yield target
        target.assert_sound()


def test_the_fleet_answers_as_its_openapi_page_says(fleet: Target) -> None:
    seen = send_generated(fleet, CASES, derandomize=True)
    assert seen.total() >= CASES


def test_the_fleet_refuses_hostile_requests(fleet: Target) -> None:
    send_hostile(fleet.port, FLEET_ROUTES)


def test_the_node_refuses_hostile_requests(node: Target) -> None:
    send_hostile(node.port, NODE_ROUTES[:2])


def test_the_node_convicts_a_prover_that_claims_garbage(node: Target) -> None:
    seconds_to_convict(node.url, ORDER_OF_ONE_NODE)


def test_the_gateway_refuses_hostile_requests(gateway: tuple[Target, list[Backend]]) -> None:
    target, backends = gateway
    routes = gateway_routes(backends[1].url)
    before = [len(backend.calls) for backend in backends]
    send_hostile(target.port, [routes[0], routes[-1]])
    # The gateway relayed no hostile request to a backend.
    assert [len(backend.calls) for backend in backends] == before
