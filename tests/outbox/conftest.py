from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from proofserve.outbox.store import SqliteOutbox

from .support import FastClock, Target, running_target


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> FastClock:
    return FastClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outbox.sqlite"


@pytest.fixture
async def store(path: Path, clock: FastClock) -> AsyncIterator[SqliteOutbox]:
    async with await SqliteOutbox.open(path, clock) as opened:
        yield opened


@pytest.fixture
def target(clock: FastClock) -> Iterator[Target]:
    with running_target(clock) as started:
        yield started
