"""A real PostgreSQL for tests of fleets, and databases of both kinds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from endurance.fleet.postgres import NoPostgres, Postgres, postgres


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
