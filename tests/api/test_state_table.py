"""Every (state, call) pair over HTTP: a legal call changes the state, a refused one does not."""

import itertools
from typing import Any

import pytest

from api.distance_bodies import (
    CLAIMS,
    INIT,
    INIT_VALIDATE,
    PHASE_GENERATE,
    PHASE_VALIDATE,
    ROUND,
    VALIDATE,
)
from api.support import ORDER, START, STOP, Server, serving

pytestmark = pytest.mark.anyio

OTHER = {**ROUND, "block_hash": "another block"}
# The call, its body, and the next state; None if the state stays.
CALLS: dict[str, tuple[str, Any, str | None]] = {
    "init": (INIT, OTHER, "IDLE"),
    "init/generate": (START, OTHER, "GENERATING"),
    "init/generate artifact": (START, ORDER, "GENERATING"),
    "init/validate": (INIT_VALIDATE, OTHER, "VALIDATING"),
    "phase/generate": (PHASE_GENERATE, None, "GENERATING"),
    "phase/validate": (PHASE_VALIDATE, None, "VALIDATING"),
    "validate": (VALIDATE, CLAIMS, None),
    "stop": (STOP, None, "STOPPED"),
}
NEEDS_ROUND = {"phase/generate", "phase/validate", "validate"}
CONFIGURES = {"init", "init/generate", "init/generate artifact", "init/validate"}
# The calls that lead to each state, in order.
STATES: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "fresh": ("IDLE", []),
    "initialised": ("IDLE", [(INIT, ROUND)]),
    "generating": ("GENERATING", [(START, ROUND)]),
    "generating artifacts": ("GENERATING", [(START, ORDER)]),
    "validating": ("VALIDATING", [(INIT_VALIDATE, ROUND)]),
    "stopped": ("STOPPED", [(START, ROUND), (STOP, None)]),
    "stopped artifacts": ("STOPPED", [(START, ORDER), (STOP, None)]),
    "stopped and nothing else": ("STOPPED", [(STOP, None)]),
}


def refusal(state: str, call: str) -> int | None:
    """The status of a refused pair, None for a legal one."""
    if call in NEEDS_ROUND:
        if state in ("fresh", "stopped and nothing else"):
            return 400
        return 409 if "artifacts" in state else None
    return 409 if call in CONFIGURES and state.startswith("generating") else None


async def picture(server: Server) -> tuple[Any, ...]:
    """The state that a refused call must not change."""
    body = await server.status()
    loop_runs = not server.node.manager._no_round.is_set()
    return body["state"], body["config"], body["round_id"], body["r_target"], loop_runs


@pytest.mark.parametrize(("state", "call"), list(itertools.product(STATES, CALLS)))
async def test_every_state_and_call(state: str, call: str) -> None:
    async with serving() as server:
        name, way = STATES[state]
        for path, body in way:
            assert (await server.post(path, body)).status_code == 200
        before = await picture(server)
        assert before[0] == name
        path, body, target = CALLS[call]
        response = await server.post(path, body)
        after = await picture(server)
        refused = refusal(state, call)
        if refused is not None:
            assert response.status_code == refused, response.text
            assert response.json()["detail"]
            assert after == before
            return
        assert response.status_code == 200, response.text
        assert after[0] == (target or name)
        assert after[4] == (after[0] == "GENERATING")
        if call in CONFIGURES:
            assert after[1]["block_hash"] == body["block_hash"]
        else:
            assert after[1:4] == before[1:4]
