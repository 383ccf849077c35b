"""Every test of the store runs on SQLite and on a real PostgreSQL."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from endurance.fleet.postgres import NoPostgres, Postgres, postgres
from proofserve.fleet.sql.store import FleetStore


@pytest.fixture(scope="session")
def server() -> Iterator[Postgres]:
    try:
        with postgres() as started:
            yield started
    except NoPostgres as error:
        pytest.skip(f"no PostgreSQL can be started here: {error}")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "fleet.sqlite")
    server: Postgres = request.getfixturevalue("server")
    return server.database()


@pytest.fixture
async def store(url: str) -> AsyncIterator[FleetStore]:
    async with await FleetStore.open(url) as opened:
        yield opened
