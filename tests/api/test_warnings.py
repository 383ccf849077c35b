"""The warning of a round during which chat may wait for longer than it should."""

from dataclasses import replace

import pytest

from api.distance_bodies import INIT, ROUND
from api.support import STATUS, serving
from proofserve.rounds.status import EngineGauges
from rounds.doubles import QUICK

pytestmark = pytest.mark.anyio

TEXT = (
    "a chat request may wait 512 ms for the smallest part of a forward of 1 nonce, longer than 250"
    " ms (--poc-max-wait-ms)"
)


async def test_a_forward_that_is_too_long_is_named_by_init_status_metrics_and_page() -> None:
    async with serving(QUICK) as server:
        seen = await server.engine.gauges()
        slow = replace(seen, max_wait_s=0.25, forward_nonces=1, forward_s=3.0, part_s=0.512)

        async def gauges() -> EngineGauges:
            return slow

        server.engine.gauges = gauges  # type: ignore[method-assign]
        answer = await server.post(INIT, ROUND)
        assert answer.json()["warning"] == TEXT
        status = (await server.get(STATUS)).json()
        assert status["warning"] == TEXT
        assert status["engine"]["forward_nonces"] == 1
        text = (await server.get("/metrics")).text
        assert "proofserve_over_max_wait 1.0" in text
        assert "proofserve_max_wait_seconds 0.25" in text
