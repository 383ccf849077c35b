"""``POST /measure``: the forwards that it runs, and the requests that it refuses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from api.support import ORDER, Server, said
from proofserve.api import proof_routes
from proofserve.protocol.identity import Block
from proofserve.protocol.network_schemes import DistanceScheme
from proofserve.protocol.schemes import scheme
from proofserve.rounds.records import Workload

pytestmark = pytest.mark.anyio

ARTIFACT: dict[str, Any] = {
    "block_hash": "block",
    "public_key": "key",
    "params": ORDER["params"],
    "batch_size": 8,
    "forwards": 4,
}
DISTANCE = {**{k: v for k, v in ARTIFACT.items() if k != "params"}, "seq_len": 16}


class Stopwatch:
    """An engine that takes two seconds for every measurement."""

    def __init__(self) -> None:
        self.asked: list[tuple[Workload, tuple[int, ...], int]] = []

    async def measure(
        self, work: Workload, nonces: Sequence[int], forwards: int
    ) -> tuple[int, float]:
        self.asked.append((work, tuple(nonces), forwards))
        return len(nonces) * forwards, 2.0


@pytest.fixture
def engine(server: Server) -> Stopwatch:
    made = Stopwatch()
    server.app.include_router(
        proof_routes.measure_router(lambda _: server.node, lambda _: made.measure)
    )
    return made


@pytest.mark.parametrize(
    ("order", "made_by"),
    [(ARTIFACT, scheme("artifact-v1", k_dim=12)), (DISTANCE, DistanceScheme())],
    ids=["artifact", "distance"],
)
async def test_measure_runs_bare_forwards_of_both_protocols(
    server: Server, engine: Stopwatch, order: dict[str, Any], made_by: Any
) -> None:
    response = await server.post("/measure", order)
    assert response.json() == {
        "nonces_per_second": 16.0,
        "seconds_per_forward": 0.5,
        "sequences": 8,
    }
    assert engine.asked == [(Workload(made_by, Block("block", 0), "key", 16), tuple(range(8)), 4)]


async def test_a_sketch_is_two_sequences_a_nonce(engine: Stopwatch, server: Server) -> None:
    server.node = replace(server.node, deployment=replace(server.node.deployment, scheme=None))
    response = await server.post("/measure", {**ARTIFACT, "scheme": "sketch-v1"})
    assert response.json()["sequences"] == 16
    assert engine.asked[0][0].scheme == scheme("sketch-v1", k_dim=12)


async def test_another_scheme_than_the_deployed_one_is_not_measured(
    engine: Stopwatch, server: Server
) -> None:
    response = await server.post("/measure", {**ARTIFACT, "scheme": "sketch-v1"})
    assert response.status_code == 409
    assert engine.asked == []


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({**ARTIFACT, "seq_len": 16}, "exactly one of params"),
        ({**DISTANCE, "scheme": "sketch-v1"}, "scheme belongs to params"),
        ({k: v for k, v in DISTANCE.items() if k != "seq_len"}, "exactly one of params"),
        ({**DISTANCE, "forwards": 0}, "body.forwards: "),
        ({**DISTANCE, "batch_size": 1025}, "body.batch_size: "),
    ],
)
async def test_invalid_measurements_are_refused(
    server: Server, engine: Stopwatch, order: dict[str, Any], message: str
) -> None:
    response = await server.post("/measure", order)
    assert response.status_code == 422
    assert message in said(response)
    assert engine.asked == []
