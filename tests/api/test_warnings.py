"""Warnings of rounds and jobs: chat may wait for too long, or a sketch is short."""

from dataclasses import replace

import pytest

from api.distance_bodies import INIT, ROUND
from api.support import GENERATE, JOB, ORDER, START, STATUS, STOP, serving
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


FEW = (
    "k_dim 12: distances of such sketches spread 2.3 times as far as with the default of 64, so a"
    " verdict needs some 5.3 times as many nonces"
)


async def test_a_round_and_a_job_of_a_short_sketch_say_what_it_costs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(scheme=None) as server:
        for name in ("sketch-v1", "sketch-v2"):
            started = await server.post(START, {**ORDER, "scheme": name})
            assert started.json()["warning"] == (await server.status())["warning"] == FEW
            assert (await server.status())["config"]["k_dim"] == 12
            await server.post(STOP)
            job = await server.post(GENERATE, {**JOB, "scheme": name, "wait": True})
            assert job.json()["warning"] == FEW
            assert job.json()["encoding"]["k_dim"] == 2 * 12
    assert sum(FEW in each.message for each in caplog.records) == 2


@pytest.mark.parametrize("params", [{"k_dim": 64}, {}])
async def test_a_sketch_of_the_usual_length_has_no_warning(params: dict[str, int]) -> None:
    order = {**ORDER, "scheme": "sketch-v2", "params": {"model": "toy", "seq_len": 16, **params}}
    async with serving(scheme=None) as server:
        assert "warning" not in (await server.post(START, order)).json()
        status = await server.status()
        await server.post(STOP)
    assert (status["config"]["k_dim"], status["warning"]) == (64, None)


async def test_the_network_s_own_requests_have_no_warning() -> None:
    """They have 12 values and no scheme."""
    async with serving(scheme=None) as server:
        assert "warning" not in (await server.post(START, ORDER)).json()
        await server.post(STOP)
        job = (await server.post(GENERATE, {**JOB, "wait": True})).json()
        assert "warning" not in job
        assert job["encoding"]["k_dim"] == 12
        assert (await server.status())["warning"] is None
