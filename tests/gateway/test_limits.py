"""Limits that hold while many clients send requests at once; the backends count the requests."""

import asyncio
import time
from collections import Counter

import pytest

from gateway.scripted import Call, after, answer, answers, backends
from gateway.serving import KINDS_OF_LOOP, Answer, Server, once, order, plan_for, post, serving
from gateway.test_faults import nothing_is_held
from proofserve.gateway.records import ClientSpec, Timeouts
from support.pace import until

pytestmark = pytest.mark.anyio

LOOPS = pytest.mark.parametrize("loop", KINDS_OF_LOOP)
KEY = "Authorization: Bearer secret"


async def briefly(call: Call) -> None:
    await asyncio.sleep(0.02)
    await answers(call)


async def race(server: Server, count: int, request: bytes) -> list[Answer]:
    return list(await asyncio.gather(*(once(server.port, request) for _ in range(count))))


# -- of one key ----------------------------------------------------------------------------------


@LOOPS
async def test_racing_clients_of_one_key_never_exceed_its_concurrency(loop: str) -> None:
    clients = (
        ClientSpec(name="one", key="secret", concurrency=7),
        ClientSpec(name="other", key="second"),
    )
    async with (
        backends(briefly) as (backend,),
        serving(plan_for(backend, clients=clients), loop) as server,
    ):
        got = await race(server, 200, post(order(), KEY))
        assert backend.most <= 7
        statuses = Counter(each.status for each in got)
        assert statuses[200] == len(backend.calls) >= 7
        assert statuses[200] + statuses[429] == 200
        refused = [each for each in got if each.status == 429]
        assert {each.code for each in refused} == {"concurrency_limit"}
        assert {each.header("retry-after") for each in refused} == {"1"}
        # Another key is another limit.
        others = await race(server, 20, post(order(), "Authorization: Bearer second"))
        assert [each.status for each in others] == [200] * 20
        await nothing_is_held(server, backend)


@LOOPS
async def test_racing_clients_of_one_key_never_exceed_its_tokens(loop: str) -> None:
    asked = post(body := order(max_tokens=100), KEY)
    tokens = (len(body) + 100) * 25 + 50
    clients = (ClientSpec(name="one", key="secret", tokens_per_minute=tokens),)
    # They use all of what was set aside for them, so that nothing comes back.
    used = len(body)
    script = answer("200 OK", b'{"usage":{"prompt_tokens":%d,"completion_tokens":100}}' % used)
    async with (
        backends(script) as (backend,),
        serving(plan_for(backend, clients=clients), loop) as server,
    ):
        got = await race(server, 200, asked)
        assert Counter(each.status for each in got) == {200: 25, 429: 175}
        assert len(backend.calls) == 25
        refused = [each for each in got if each.status == 429]
        assert {each.code for each in refused} == {"token_rate_limit"}
        assert all(1 <= int(each.header("retry-after") or 0) <= 61 for each in refused)


async def test_what_an_answer_did_not_use_is_there_for_the_next() -> None:
    body = order(max_tokens=100)
    clients = (ClientSpec(name="one", key="secret", tokens_per_minute=(len(body) + 100) * 2),)
    async with (
        backends(answers) as (backend,),
        serving(plan_for(backend, clients=clients)) as server,
    ):
        # Seven tokens each: two at a time are all that fits, and many after each other do.
        for _ in range(20):
            assert (await once(server.port, post(body, KEY))).status == 200


@LOOPS
async def test_racing_clients_of_one_key_never_exceed_its_requests(loop: str) -> None:
    clients = (ClientSpec(name="one", key="secret", requests_per_minute=30),)
    async with (
        backends(answers) as (backend,),
        serving(plan_for(backend, clients=clients), loop) as server,
    ):
        got = await race(server, 200, post(order(), KEY))
        assert Counter(each.status for each in got) == {200: 30, 429: 170}
        assert len(backend.calls) == 30
        assert {each.code for each in got if each.status == 429} == {"request_rate_limit"}


# -- of the gateway ------------------------------------------------------------------------------


@LOOPS
async def test_a_hundred_permits_are_a_hundred_requests_and_the_rest_wait_in_order(
    loop: str,
) -> None:
    go_on = asyncio.Event()
    async with (
        backends(after(go_on, briefly)) as (backend,),
        serving(plan_for(backend, max_concurrent=100), loop) as server,
    ):
        admission = server.gateway.admission
        asking = []
        for number in range(150):
            asking.append(asyncio.create_task(once(server.port, post(order(user=str(number))))))
            await until(lambda n=number: admission.in_use + admission.queued > n)
        assert (admission.in_use, admission.queued) == (100, 50)
        await until(lambda: backend.now == 100)
        go_on.set()
        got = await asyncio.gather(*asking)
        assert [each.status for each in got] == [200] * 150
        assert backend.most == 100
        await nothing_is_held(server, backend)


async def test_waiting_requests_are_served_in_the_order_of_arrival() -> None:
    go_on = asyncio.Event()
    async with (
        backends(after(go_on, briefly)) as (backend,),
        serving(plan_for(backend, max_concurrent=1)) as server,
    ):
        admission = server.gateway.admission
        asking = []
        for number in range(12):
            asking.append(asyncio.create_task(once(server.port, post(order(user=str(number))))))
            await until(lambda n=number: admission.in_use + admission.queued > n)
        go_on.set()
        await asyncio.gather(*asking)
        assert [call.body for call in backend.calls] == [order(user=str(n)) for n in range(12)]


@LOOPS
async def test_a_request_that_waits_too_long_is_told_in_time(loop: str) -> None:
    wait = 0.5
    go_on = asyncio.Event()

    async def timed(server: Server) -> float:
        began = time.monotonic()
        got = await once(server.port)
        assert (got.status, got.code) == (503, "queue_timeout")
        assert got.header("retry-after") == "1"
        return time.monotonic() - began

    plan = {"max_concurrent": 20, "timeouts": Timeouts(queue=wait)}
    async with (
        backends(after(go_on, answers)) as (backend,),
        serving(plan_for(backend, **plan), loop) as server,
    ):
        served = [asyncio.create_task(once(server.port)) for _ in range(20)]
        await until(lambda: backend.now == 20)
        # All ten of one try: a busy machine spoils some of them.
        for _ in range(20):
            waits = await asyncio.gather(*(timed(server) for _ in range(10)))
            assert min(waits) >= wait
            if max(waits) < wait * 1.1 + 0.2:
                break
        else:
            pytest.fail(f"the slowest of the last ten came after {max(waits):.2f} s")
        go_on.set()
        assert [each.status for each in await asyncio.gather(*served)] == [200] * 20
        assert len(backend.calls) == 20


async def test_without_a_queue_the_refusal_says_that_queueing_is_off() -> None:
    go_on = asyncio.Event()
    async with (
        backends(after(go_on, answers)) as (backend,),
        serving(plan_for(backend, max_concurrent=1, queue_limit=0)) as server,
    ):
        first = asyncio.create_task(once(server.port))
        await until(lambda: server.gateway.admission.in_use == 1)
        got = await once(server.port)
        assert (got.status, got.code) == (503, "queue_full")
        assert b"queueing is off" in got.raw
        go_on.set()
        assert (await first).status == 200


async def test_a_full_queue_refuses_the_next_request() -> None:
    go_on = asyncio.Event()
    async with (
        backends(after(go_on, answers)) as (backend,),
        serving(plan_for(backend, max_concurrent=2, queue_limit=3)) as server,
    ):
        admission = server.gateway.admission
        first = [asyncio.create_task(once(server.port)) for _ in range(5)]
        await until(lambda: (admission.in_use, admission.queued) == (2, 3))
        for got in await race(server, 20, post()):
            assert (got.status, got.code) == (503, "queue_full")
            assert int(got.header("retry-after") or 0) >= 1
        go_on.set()
        assert [each.status for each in await asyncio.gather(*first)] == [200] * 5
        assert len(backend.calls) == 5
