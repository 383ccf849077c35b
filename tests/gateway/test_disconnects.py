"""Clients that disconnect at any moment: the gateway frees everything that they held."""

import asyncio
import random

import pytest

from gateway.scripted import (
    END,
    OK,
    SSE_HEAD,
    Backend,
    Call,
    after,
    answers,
    backends,
    event,
    not_accepting,
    reset,
    silent,
)
from gateway.serving import (
    KINDS_OF_LOOP,
    Server,
    Wire,
    never_unhealthy,
    once,
    order,
    plan_for,
    post,
    serving,
    wire,
)
from gateway.test_faults import nothing_is_held
from proofserve.gateway.records import Timeouts
from support.pace import until

pytestmark = pytest.mark.anyio

LOOPS = pytest.mark.parametrize("loop", KINDS_OF_LOOP)


async def slow(call: Call) -> None:
    """An answer that takes a third of a second; nothing is sent in the first half."""
    for _ in range(4):
        await asyncio.sleep(0.04)
        if call._reader.at_eof():
            return
    if b'"stream": true' not in call.body:
        await asyncio.sleep(0.16)
        await call.send(OK)
        return
    await call.send(SSE_HEAD)
    for _ in range(8):
        await call.send(event("a word"))
        await asyncio.sleep(0.02)
    await call.send(END)


async def leaves(server: Server, chance: random.Random) -> bool:
    """Send a request, disconnect later in a random way; return whether the answer was complete."""
    request = post(order(stream=chance.random() < 0.5))
    patience, rudely = chance.uniform(0.0, 1.0), chance.random() < 0.5
    if chance.random() < 0.1:
        request = request[: chance.randrange(1, len(request))]
    async with wire(server.port) as client:
        client.send(request)
        try:
            return (await asyncio.wait_for(client.answer(), patience)).complete
        except TimeoutError:
            if rudely:
                reset(client.writer)
            return False


@LOOPS
@pytest.mark.parametrize("seed", [1, 2])
async def test_fifty_clients_that_leave_at_random_leave_nothing_behind(
    loop: str, seed: int
) -> None:
    chance = random.Random(seed)
    async with (
        backends(slow, slow) as both,
        serving(plan_for(*both, max_concurrent=15), loop) as server,
    ):
        results = await asyncio.gather(*(leaves(server, chance) for _ in range(50)))
        await nothing_is_held(server, *both)
        await until(lambda: server.connections == 0)
        relayed = sum(len(each.calls) for each in both)
        # Some were served, some disconnected, and some never reached a backend.
        assert not all(results)
        assert 0 < relayed < 50
        assert (await once(server.port)).status == 200


async def left(server: Server, backend: Backend, client: Wire) -> None:
    """Disconnect a client. Assert that its backend sees it at once and nothing is held."""
    (call,) = backend.calls
    await client.close()
    await until(call.ended.is_set, seconds=20.0)
    await nothing_is_held(server, backend)
    assert server.gateway.totals.outcomes["anonymous", "client_left"] == 1


@LOOPS
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_byte_frees_everything(
    loop: str, stream: bool
) -> None:
    async with (
        backends(silent) as (backend,),
        serving(plan_for(backend), loop) as server,
        wire(server.port) as client,
    ):
        client.send(post(order(stream=stream)))
        await until(lambda: bool(backend.calls))
        await left(server, backend, client)


@LOOPS
@pytest.mark.parametrize("head", [SSE_HEAD + event("one"), OK[:-1]], ids=["stream", "plain"])
async def test_a_client_that_leaves_in_the_middle_of_an_answer_frees_everything(
    loop: str, head: bytes
) -> None:
    async def begins(call: Call) -> None:
        await call.send(head)
        await call.gone()

    async with (
        backends(begins) as (backend,),
        serving(plan_for(backend), loop) as server,
        wire(server.port) as client,
    ):
        client.send(post())
        await client.head()
        await left(server, backend, client)


async def test_a_client_that_leaves_the_queue_is_not_served() -> None:
    go_on = asyncio.Event()
    async with (
        backends(after(go_on, answers)) as (backend,),
        serving(plan_for(backend, max_concurrent=1)) as server,
        wire(server.port) as first,
        wire(server.port) as second,
        wire(server.port) as third,
    ):
        for number, client in enumerate((first, second, third)):
            client.send(post(order(user=str(number))))
            await until(lambda n=number: server.gateway.admission.queued + backend.now == n + 1)
        await second.close()
        await until(lambda: server.gateway.admission.queued == 1)
        go_on.set()
        assert (await first.answer()).status == (await third.answer()).status == 200
        assert [call.body for call in backend.calls] == [order(user="0"), order(user="2")]


async def test_a_client_that_leaves_while_its_backend_does_not_accept_frees_its_permit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never_unhealthy(monkeypatch)
    with not_accepting() as url:
        async with (
            serving(plan_for(url, timeouts=Timeouts(connect=3.0))) as server,
            wire(server.port) as client,
        ):
            client.send(post())
            await until(lambda: server.gateway.admission.in_use == 1)
            await client.close()
            # The permit is free at once; the attempt ends when its time is over.
            await until(lambda: server.gateway.admission.in_use == 0, seconds=10.0)
            assert server.gateway.pool.backends[0].outstanding == 0


async def test_requests_sent_ahead_end_with_their_client() -> None:
    async with (
        backends(silent) as (backend,),
        serving(plan_for(backend)) as server,
        wire(server.port) as client,
    ):
        client.send(post() * 3)
        await until(lambda: len(server.gateway.deadlines.watched) == 3 and len(backend.calls) == 1)
        await client.close()
        await until(lambda: not server.gateway.deadlines.watched)
        await nothing_is_held(server, backend)
        assert len(backend.calls) == 1


async def test_a_closing_gateway_cuts_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    never_unhealthy(monkeypatch)
    with not_accepting() as url:
        async with backends(silent) as (backend,):
            server = Server(plan_for(backend, url, timeouts=Timeouts(connect=60.0)))
            await server.start()
            clients = [asyncio.create_task(once(server.port)) for _ in range(4)]
            await until(lambda: backend.now == 2)
            await server.stop()
            for client in clients:
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await client
            await until(lambda: not backend.connections)
