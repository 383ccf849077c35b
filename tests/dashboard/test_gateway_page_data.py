"""What a gateway's page gets, who may see it, and how a gateway ends beside an open page."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.scripted import Backend, answers, backends, resets
from gateway.serving import never_tried_again, once, order, plan_for, post, serving, wire
from proofserve.gateway.dashboard import LoadHistory, quantile
from proofserve.gateway.records import ClientSpec, GatewayPlan
from proofserve.settings.process import environment
from support.gateway import gateway_process
from support.pace import until

pytestmark = pytest.mark.anyio


async def shown(port: int, key: str | None = None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        answer = await client.get("/dashboard/snapshot", headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def served_plan(*targets: Backend | str, **changes: Any) -> GatewayPlan:
    return plan_for(*targets, dashboard=True, **changes)


async def test_answers_and_errors_are_shown_by_backend_and_by_key() -> None:
    clients = (ClientSpec(name="a", key="a-key"), ClientSpec(name="b", key="b-key", concurrency=1))
    async with backends(answers, resets) as (good, bad):
        plan = served_plan(good, bad, clients=clients)
        async with serving(plan) as server:
            for _ in range(4):
                await once(server.port, post(order(), "Authorization: Bearer a-key"))
            await once(server.port, post(order(), "Authorization: Bearer no-key"))
            client = next(c for c in server.gateway.clients.all() if c.name == "b")
            client.in_flight = 1
            await once(server.port, post(order(), "Authorization: Bearer b-key"))
            client.in_flight = 0
            seen = await shown(server.port)
    rows = {row["name"]: row for row in seen["members"]}
    assert rows[good.url]["state"] == "up"
    assert rows[bad.url]["faults"] >= 1
    keys = {row["key"]: row for row in seen["gateway"]["keys"]}
    assert (keys["a"]["requests"], keys["a"]["errors"]) == (4, 0)
    # A request that a limit refused is of its key, though the metrics do not say so.
    assert keys["b"]["codes"] == {"concurrency_limit": 1}
    assert keys["unknown"]["codes"] == {"invalid_api_key": 1}
    (traffic,) = (each for each in seen["gateway"]["backends"] if each["backend"] == good.url)
    assert (traffic["answers"], traffic["tokens"]) == (4, 28)


async def test_a_backend_is_drained_by_the_action_that_the_page_offers() -> None:
    async with backends(answers) as (backend,), serving(served_plan(backend)) as server:
        for expected in ("drained", "up"):
            (offer,) = (await shown(server.port))["members"][0]["actions"]
            url = f"http://127.0.0.1:{server.port}{offer['path']}"
            async with httpx.AsyncClient() as client:
                assert (await client.post(url, json=offer["body"])).status_code == 200
            # A reading is fresh for two seconds.
            server._server.lifespan.state["dashboard"]._latest = None
            assert (await shown(server.port))["members"][0]["state"] == expected


async def test_a_silent_backend_is_down_and_one_with_faults_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never_tried_again(monkeypatch)
    async with (
        backends(resets) as (backend,),
        serving(served_plan(backend, probe_interval=0.02)) as server,
    ):
        for _ in range(3):
            await once(server.port)
        assert (await shown(server.port))["members"][0]["state"] == "rests"
        await backend.die()
        await until(lambda: not server.gateway.pool.backends[0].healthy)
        server._server.lifespan.state["dashboard"]._latest = None
        (row,) = (await shown(server.port))["members"]
        assert (row["state"], row["level"]) == ("down", "bad")


@pytest.mark.parametrize(("key", "status"), [(None, 403), ("wrong", 403), ("secret", 200)])
async def test_the_data_are_for_operators_alone(key: str | None, status: int) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        backends(answers) as (backend,),
        serving(served_plan(backend, admin_key="secret")) as server,
        httpx.AsyncClient(headers=headers) as client,
    ):
        url = f"http://127.0.0.1:{server.port}/dashboard"
        assert (await client.get(url)).status_code == 200
        assert (await client.get(f"{url}/snapshot")).status_code == status
        async with client.stream("GET", f"{url}/events") as events:
            assert events.status_code == status


async def test_without_the_option_there_is_no_page() -> None:
    async with (
        backends(answers) as (backend,),
        serving(plan_for(backend)) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client,
    ):
        assert (await client.get("/dashboard")).status_code == 404


async def test_the_history_counts_over_the_last_minutes() -> None:
    async with backends(answers) as (backend,), serving(served_plan(backend)) as server:
        history = await in_loop(server.gateway.loop, lambda: LoadHistory(server.gateway))
        for _ in range(3):
            await once(server.port)
        await in_loop(server.gateway.loop, history.look)
        assert history.requests.trend().values[-1] is not None
        assert (history.requests.trend().values[-1] or 0) > 0
        assert history.ended() == (3, 0)
        assert sum(history.waits()) == 3
        # A backend that has left takes its history with it.
        gone = server.gateway.pool.backends.pop()
        await in_loop(server.gateway.loop, history.look)
        assert history.rate_of(gone.name).values == ()
        server.gateway.pool.backends.append(gone)


async def in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return call()

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), loop))


async def test_an_open_page_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async with backends(answers) as (backend,):
        with gateway_process(
            tmp_path, environment({}), backend_url=backend.url, dashboard="true"
        ) as process:
            port = int(process.url.rpartition(":")[2])
            request = b"GET /dashboard/events HTTP/1.1\r\nHost: here\r\n\r\n"
            async with wire(port) as page:
                page.send(request)
                assert (await page.head())[0] == 200
                first = await page.reader.readuntil(b"\n\n")
                body = first[first.index(b"data: ") + 6 :]
                assert json.loads(body)["kind"] == "gateway"
                loop = asyncio.get_running_loop()
                began = loop.time()
                process.process.terminate()
                await until(lambda: process.process.poll() is not None)
                # A second for load balancers, two until the stream looks; without an end of its
                # own, the stream would be cut off after five more.
                print(f"ended after {loop.time() - began:.1f} s")
                assert process.process.returncode == 0


@pytest.mark.parametrize(
    ("counts", "part", "expected"),
    [
        ((0, 0, 0), 0.5, None),
        ((4, 0, 0), 0.5, 0.5),
        ((2, 2, 0), 0.75, 1.5),
        ((0, 0, 9), 0.95, 2.0),
        ((1, 8, 1), 0.5, 1.5),
    ],
)
def test_a_quantile_lies_within_its_bucket(
    counts: tuple[int, ...], part: float, expected: float | None
) -> None:
    assert quantile((1.0, 2.0), counts, part) == expected
