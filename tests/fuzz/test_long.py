"""`make fuzz`: thousands of requests and every hostile body, to a real node and gateway."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz.garbage_claims import seconds_to_convict
from fuzz.gateways import real_gateway
from fuzz.generated import Seen, send_generated
from fuzz.nodes import real_node
from fuzz.routes import gateway_routes, node_routes
from fuzz.send_hostile import send_hostile
from fuzz.targets import Target
from gateway.scripted import Backend
from support.node import DISTANCE_ROUND, ROUND
from support.pace import PACE

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(3600)]
CASES = 2000
# Seconds for a refusal by a server that does nothing else.
REFUSED_WITHIN_S = 0.1 * PACE


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


def test_the_node_answers_as_its_openapi_page_says(node: Target) -> None:
    seen = send_generated(node, CASES, derandomize=False)
    show(seen)
    assert seen.total() >= CASES
    node.assert_sound()


def test_the_gateway_answers_as_its_openapi_page_says(
    gateway: tuple[Target, list[Backend]],
) -> None:
    seen = send_generated(gateway[0], CASES, derandomize=False)
    show(seen)
    assert seen.total() >= CASES
    gateway[0].assert_sound()


def test_the_node_refuses_hostile_requests_at_once(node: Target) -> None:
    node.assert_sound()
    send_hostile(node.port, node_routes(ROUND, DISTANCE_ROUND), REFUSED_WITHIN_S)
    node.assert_sound()


def test_the_node_convicts_a_prover_that_claims_garbage(node: Target) -> None:
    node.assert_sound()
    took = seconds_to_convict(node.url, ROUND)
    print(f"{len(took)} verdicts, the slowest in {1e3 * max(took.values()):.1f} ms")
    assert max(took.values()) < REFUSED_WITHIN_S


def test_the_gateway_refuses_hostile_requests_at_once(
    gateway: tuple[Target, list[Backend]],
) -> None:
    target, backends = gateway
    target.assert_sound()
    before = [len(backend.calls) for backend in backends]
    send_hostile(target.port, gateway_routes(backends[1].url), REFUSED_WITHIN_S)
    assert [len(backend.calls) for backend in backends] == before
    target.assert_sound()
