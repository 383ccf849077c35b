"""What the requests of one process share, put together from a plan."""

import pytest

from proofserve.gateway.answer import HOP_BY_HOP
from proofserve.gateway.gateway import Gateway
from proofserve.gateway.records import BackendSpec, ClientSpec, GatewayPlan

pytestmark = pytest.mark.anyio
PLAN = GatewayPlan(
    backends=(BackendSpec("http://a"), BackendSpec("unix:/run/b.sock", 2)),
    clients=(ClientSpec(name="anna", key="k"),),
    max_concurrent=3,
    queue_limit=4,
    affinity=True,
    backend_key="secret",
    cors_origins=("https://page",),
)


def value(gateway: Gateway, name: str, **labels: str) -> float | None:
    return gateway.metrics.get_sample_value(f"gateway_{name}", labels)


async def test_every_part_is_told_the_plan() -> None:
    gateway = Gateway(PLAN)
    assert (gateway.admission.limit, gateway.admission.queue_limit) == (3, 4)
    assert [(b.name, b.spec.weight) for b in gateway.pool.backends] == [
        ("http://a", 1),
        ("unix:/run/b.sock", 2),
    ]
    assert not gateway.clients.open
    assert gateway.cross_origin.configured
    assert not gateway.draining
    same = {gateway.pool.choose(None, b"the same", ()) for _ in range(4)}
    assert len(same) == 1


async def test_the_clients_keys_stay_here_and_the_backends_key_goes_there() -> None:
    gateway = Gateway(PLAN)
    assert b"authorization" in gateway.held_back
    assert gateway.backend_lines == b"authorization: Bearer secret\r\n"
    plain = Gateway(GatewayPlan(PLAN.backends))
    assert (plain.held_back, plain.backend_lines) == (HOP_BY_HOP, b"")


async def test_gauges_show_what_is_now() -> None:
    gateway = Gateway(PLAN)
    first = gateway.pool.backends[0]
    (anna,) = gateway.clients.all()
    up = {"backend": "http://a"}
    assert value(gateway, "permits") == 3
    assert value(gateway, "in_flight") == value(gateway, "queued") == 0
    assert value(gateway, "backend_up", **up) == 1
    for _ in range(3):
        first.failed()
    gateway.admission.in_use, anna.in_flight = 2, 1
    first.chosen()
    assert value(gateway, "in_flight") == 2
    assert value(gateway, "client_in_flight", client="anna") == 1
    assert value(gateway, "backend_in_flight", **up) == 1
    assert value(gateway, "backend_connections", **up) == 0
    assert value(gateway, "backend_up", **up) == 0


async def test_two_gateways_count_each_for_itself() -> None:
    one, two = Gateway(PLAN), Gateway(PLAN)
    one.totals.outcomes["anna", "ok"] += 1
    assert value(one, "requests_total", client="anna", outcome="ok") == 1
    assert value(two, "requests_total", client="anna", outcome="ok") is None
