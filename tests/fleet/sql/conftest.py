"""The store of each test, on SQLite and on a real PostgreSQL."""

from collections.abc import AsyncIterator

import pytest

from proofserve.fleet.sql.store import FleetStore


@pytest.fixture
async def store(url: str) -> AsyncIterator[FleetStore]:
    async with await FleetStore.open(url) as opened:
        yield opened
