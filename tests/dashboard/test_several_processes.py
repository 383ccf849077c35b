"""A page that opens at an API process which does not own the node."""

from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter, Request

from proofserve.api import node_page
from proofserve.api.access import ApiError
from proofserve.api.node import Node
from proofserve.dashboard.routes import PAGE, SNAPSHOT
from proofserve.settings.node import NodeSettings
from wiring.api_process import ApiProcess, settings_in

pytestmark = pytest.mark.anyio


class ProcessWithPage(ApiProcess):
    """As the plugin makes it: each process has the routes, and only the owner has a node."""

    def __init__(self, settings: NodeSettings, server: str) -> None:
        super().__init__(settings, server)
        self.app.include_router(node_page.router(self._node_of))

    def _node_of(self, _: Request) -> Node:
        if self.ownership.node is None:
            raise ApiError("not_enabled", "PoC not enabled")
        return self.ownership.node

    def private_routers(self, node: Node) -> list[APIRouter]:
        return [*super().private_routers(node), node_page.router(lambda _: node)]


async def test_the_snapshot_is_the_owners_and_the_page_asks_for_it_again(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, dashboard=True)
    owner, other = (ProcessWithPage(settings, "server") for _ in range(2))
    transport = httpx.ASGITransport(other.app, client=("127.0.0.1", 4711))
    async with owner.ownership.running(), other.ownership.running():
        assert other.ownership.node is None
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            assert (await client.get(PAGE)).status_code == 200
            seen = await client.get(f"{SNAPSHOT}?limit=1")
            assert seen.json()["title"] == "toy"
            tag = {"If-None-Match": seen.headers["etag"]}
            assert (await client.get(f"{SNAPSHOT}?limit=1", headers=tag)).status_code == 304
            wrong = await client.get(f"{SNAPSHOT}?limit=0")
            assert (wrong.status_code, "limit" in wrong.text) == (422, True)
            # Without a stream the page asks for snapshots instead.
            assert (await client.get(f"{PAGE}/events")).status_code == 503
