"""Backends that come and go in DNS: real backends and streams, and a scripted resolver."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.scripted import END, MODEL, SSE_HEAD, Backend, Call, answers, event
from gateway.serving import Server, once, order, plan_for, post, serving, wire
from proofserve.gateway import backends
from proofserve.gateway.records import BackendSpec
from support.pace import until

pytestmark = pytest.mark.anyio

NAME = "vllm.example"


class Zone:
    """Answers for ``NAME``: these addresses, or none at all while there are none."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = set(addresses)
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> set[str]:
        self.asked.append((host, port))
        if not self.addresses:
            raise OSError(-2, "Name or service not known")
        return self.addresses


@asynccontextmanager
async def pods(*hosts: str) -> AsyncIterator[list[Backend]]:
    """A backend at each address of this machine, all with one port."""
    made: list[Backend] = []
    try:
        for host in hosts:
            backend = Backend(answers)
            backend.host, backend.port = host, made[0].port if made else 0
            await backend.start()
            made.append(backend)
        yield made
    finally:
        for backend in made:
            await backend.die()
        await until(lambda: not any(backend.connections for backend in made))


@asynccontextmanager
async def gateway_of(zone: Zone, port: int, *fixed: str, **changes: Any) -> AsyncIterator[Server]:
    names = (BackendSpec(f"http://{NAME}:{port}", 2.0),)
    plan = plan_for(*fixed, names=names, lookup_interval=0.05, **changes)
    async with serving(plan, resolve=zone) as server:
        yield server


def names(server: Server) -> list[str]:
    return [backend.name for backend in server.gateway.pool.backends]


async def test_every_address_is_a_backend_with_the_weight_of_the_name() -> None:
    async with pods("127.0.0.1", "127.0.0.2") as (one, two):
        zone = Zone("127.0.0.1", "127.0.0.2")
        async with gateway_of(zone, one.port) as server:
            assert names(server) == [one.url, two.url]
            assert zone.asked[0] == (NAME, one.port)
            assert {each.spec.weight for each in server.gateway.pool.backends} == {2.0}
            for _ in range(4):
                assert (await once(server.port, post())).status == 200
    assert (len(one.calls), len(two.calls)) == (2, 2)
    assert one.calls[0].header("host") == [one.url.removeprefix("http://")]


async def test_a_new_address_gets_requests_and_one_that_is_gone_gets_none() -> None:
    async with pods("127.0.0.1", "127.0.0.2") as (one, two):
        zone = Zone("127.0.0.1")
        async with gateway_of(zone, one.port) as server:
            zone.addresses = {"127.0.0.2"}
            await until(lambda: names(server) == [two.url])
            for _ in range(3):
                assert (await once(server.port, post())).status == 200
            assert (len(one.calls), len(two.calls)) == (0, 3)


async def test_a_stream_at_an_address_that_is_gone_runs_to_its_end() -> None:
    last = asyncio.Event()

    async def slow(call: Call) -> None:
        await call.send(SSE_HEAD, event("first"))
        await last.wait()
        await call.send(event("last"), END)
        await call.close()

    async with pods("127.0.0.1", "127.0.0.2") as (one, two):
        one.script = slow
        zone = Zone("127.0.0.1")
        async with gateway_of(zone, one.port) as server, wire(server.port) as line:
            line.send(post(order(stream=True)))
            await until(lambda: len(one.calls) == 1)
            zone.addresses = {"127.0.0.2"}
            await until(lambda: two.url in names(server))
            asked = len(zone.asked)
            await until(lambda: len(zone.asked) > asked + 3)
            (leaving,) = [b for b in server.gateway.pool.backends if b.name == one.url]
            assert leaving.draining
            assert leaving.outstanding == 1
            assert (one.url, MODEL) in server.gateway.totals.series
            last.set()
            answer = await line.answer()
            assert answer.status == 200
            assert b"last" in answer.text
            await until(lambda: names(server) == [two.url])
            series = server.gateway.totals.series
            await until(lambda: one.url not in {backend for backend, _ in list(series)})


async def test_an_address_that_returns_is_used_again_unless_an_operator_drained_it() -> None:
    hold = asyncio.Event()

    async def held(call: Call) -> None:
        await hold.wait()
        await answers(call)

    async with pods("127.0.0.1", "127.0.0.2") as (one, two):
        one.script = two.script = held
        zone = Zone("127.0.0.1", "127.0.0.2")
        async with gateway_of(zone, one.port) as server:
            asking = [asyncio.create_task(once(server.port, post())) for _ in range(2)]
            await until(lambda: len(one.calls) == len(two.calls) == 1)
            first, second = server.gateway.pool.backends
            second.draining = True
            zone.addresses = {"127.0.0.3"}
            await until(lambda: first.draining)
            first.draining = False
            await until(lambda: first.draining)
            zone.addresses = {"127.0.0.1", "127.0.0.2"}
            await until(lambda: not first.draining)
            assert second.draining
            hold.set()
            assert [(await each).status for each in asking] == [200, 200]
            # The third address never answered a probe, and is gone again.
            await until(lambda: names(server) == [one.url, two.url])


async def test_a_name_without_an_answer_keeps_its_backends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pods("127.0.0.1") as (one,):
        zone = Zone("127.0.0.1")
        async with gateway_of(zone, one.port) as server:
            zone.addresses = set()
            asked = len(zone.asked)
            await until(lambda: len(zone.asked) > asked + 3)
            assert names(server) == [one.url]
            assert (await once(server.port, post())).status == 200
    warned = [each.message for each in caplog.records if "no address of" in each.message]
    assert warned == [
        f"no address of http://{NAME}:{one.port}, the known ones stay: Name or service not known"
    ]


async def test_a_gateway_starts_without_any_address_and_says_that_it_has_no_backend() -> None:
    async with pods("127.0.0.1") as (one,):
        zone = Zone()
        async with gateway_of(zone, one.port) as server:
            refused = await once(server.port, post())
            assert refused.status == 503
            assert refused.code == "no_backend"
            zone.addresses = {"127.0.0.1"}
            await until(lambda: names(server) == [one.url])
            assert (await once(server.port, post())).status == 200


async def test_plain_urls_stay_whatever_dns_says() -> None:
    async with pods("127.0.0.1", "127.0.0.2") as (one, two):
        zone = Zone("127.0.0.1", "127.0.0.2")
        async with gateway_of(zone, one.port, one.url) as server:
            assert names(server) == [one.url, two.url]
            zone.addresses = {"127.0.0.3"}
            await until(lambda: two.url not in names(server))
            assert one.url in names(server)
            assert not server.gateway.pool.backends[0].draining


async def test_the_systems_resolver_finds_this_machine(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with pods("127.0.0.1") as (one,):
        found = BackendSpec(f"http://localhost:{one.port}")
        async with serving(plan_for(names=(found,), lookup_interval=0.05)) as server:
            assert one.url in names(server)
            assert (await once(server.port, post())).status == 200
    assert "127.0.0.1" in await backends.addresses("localhost", 80)
    with pytest.raises(OSError, match=r".*"):
        await backends.addresses("no-such-host.invalid", 80)
