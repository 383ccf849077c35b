from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proofserve.outbox.store import SqliteOutbox
from support.fake_engine import FakeEngine


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outbox.sqlite"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteOutbox]:
    async with await SqliteOutbox.open(path) as opened:
        yield opened


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()
