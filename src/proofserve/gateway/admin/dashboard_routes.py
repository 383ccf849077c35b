"""The page of a gateway; its data are for operators, as ``/admin`` is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

from fastapi import APIRouter, Request

from proofserve.dashboard import routes
from proofserve.dashboard.routes import SnapshotFeed
from proofserve.gateway.admin.admin_access import AdminRoute
from proofserve.gateway.admin.gateway_snapshot import snapshot_of
from proofserve.gateway.admin.load_history import LoadHistory
from proofserve.gateway.relay.gateway import Gateway


def router() -> APIRouter:
    return routes.router(_feed, AdminRoute)


@asynccontextmanager
async def dashboard_of(gateway: Gateway) -> AsyncIterator[SnapshotFeed]:
    """A feed of ``gateway``, whose history grows until the context ends."""
    history = LoadHistory(gateway)
    watching = asyncio.create_task(history.watch())

    def is_ending() -> bool:
        # The server waits for open streams once the last request has ended.
        return gateway.draining and gateway.deadlines.idle.is_set()

    try:
        yield SnapshotFeed(partial(snapshot_of, gateway, history), is_ending)
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


def _feed(request: Request) -> SnapshotFeed:
    feed: SnapshotFeed = request.state.dashboard
    return feed
