"""A fleet of one toy member, for hostile requests."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
from anyio.from_thread import start_blocking_portal

from fleet.servers import ROUND, fleet_of, members
from fuzz.hostile import Form
from fuzz.nodes import POW
from fuzz.routes import Route
from fuzz.targets import Json, Target

FLEET = "/api/v1/fleet"
ROUTES = [
    Route(f"{FLEET}/members", Form({"url": "http://127.0.0.1:9", "name": "x"}, ("url", "name"))),
    Route(f"{FLEET}/members/x/cordon", Form({"reason": "x"}, ("reason",))),
]


@contextmanager
def toy_fleet(folder: Path, log: Callable[[], str]) -> Iterator[Target]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(_toy(folder)) as url:
        yield Target(url, f"^({POW}|{FLEET})/", log, _work, _aim, before=_stop)


@asynccontextmanager
async def _toy(folder: Path) -> AsyncIterator[str]:
    async with (
        members(folder, 1) as made,
        fleet_of(folder, made, start_wait_sec=0, stop_wait_sec=0) as fleet,
    ):
        yield fleet.url


def _work(http: httpx.Client) -> httpx.Response:
    http.post(f"{POW}/stop")
    return http.post(f"{POW}/generate", json={**ROUND, "nonces": [1, 2, 3], "wait": True})


def _aim(body: Json) -> Json:
    aimed = dict(body)
    if aimed.get("nonces"):
        aimed["nonces"] = list(dict.fromkeys(aimed["nonces"]))[:16]
    return aimed


def _stop(http: httpx.Client, body: Json) -> None:
    if isinstance(body, dict) and (body.get("wait") or "dist" in body):
        http.post(f"{POW}/stop")
