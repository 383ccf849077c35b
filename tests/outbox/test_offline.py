"""The outbox file opened by a process other than its server; tests/cli tests the commands."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from proofserve.outbox.offline import origin_of, reading, writing
from proofserve.outbox.store import SqliteOutbox
from proofserve.rounds.errors import OutboxUnavailable

from .support import a_spec, artifacts

COUNT = "SELECT count(*) FROM results"


@pytest.fixture
def filled(path: Path) -> Path:
    async def fill() -> None:
        async with await SqliteOutbox.open(path) as store:
            await store.open_round(a_spec())
            await store.record("r1", 3, artifacts(3, 7, 11), {})

    asyncio.run(fill())
    return path


async def add(path: Path, nonce: int) -> None:
    async with await SqliteOutbox.open(path) as store:
        await store.record("r1", nonce, artifacts(nonce), {})


def count_while_a_server_comes(path: Path) -> None:
    with reading(path) as connection:
        assert connection.execute(COUNT).fetchone() == (3,)
        asyncio.run(add(path, 15))


def test_a_reader_notices_a_server_that_opens_the_file(filled: Path) -> None:
    with pytest.raises(OutboxUnavailable, match=r"a server opened .* run this again$"):
        count_while_a_server_comes(filled)
    with reading(filled) as connection:
        assert connection.execute(COUNT).fetchone() == (4,)


def test_a_reader_sees_the_current_state_of_a_file_in_use(filled: Path) -> None:
    async def beside() -> None:
        async with await SqliteOutbox.open(filled) as store:
            with reading(filled) as connection:
                assert connection.execute(COUNT).fetchone() == (3,)
                await store.record("r1", 4, artifacts(15), {})
                assert connection.execute(COUNT).fetchone() == (4,)

    asyncio.run(beside())


def test_a_reader_sees_the_log_of_a_killed_server(filled: Path, tmp_path: Path) -> None:
    async def copied(to: Path) -> None:
        # The files of an open server are the files that a kill leaves.
        async with await SqliteOutbox.open(filled) as store:
            await store.record("r1", 4, artifacts(15), {})
            for part in ("", "-wal"):
                (to.parent / f"{to.name}{part}").write_bytes(
                    filled.with_name(f"{filled.name}{part}").read_bytes()
                )

    killed = tmp_path / "killed.sqlite"
    asyncio.run(copied(killed))
    with reading(killed) as connection:
        assert connection.execute(COUNT).fetchone() == (4,)


def test_a_reader_cannot_write(filled: Path) -> None:
    with pytest.raises(OutboxUnavailable, match="readonly"), reading(filled) as connection:
        connection.execute("DELETE FROM results")
    with reading(filled) as connection:
        assert connection.execute(COUNT).fetchone() == (3,)


def delete_and_fail(path: Path) -> None:
    with writing(path) as connection:
        connection.execute("DELETE FROM results")
        raise ValueError("no")


def test_an_unfinished_change_is_not_written(filled: Path) -> None:
    with pytest.raises(ValueError, match="no"):
        delete_and_fail(filled)
    with writing(filled) as connection:
        assert connection.execute(COUNT).fetchone() == (3,)
        connection.execute("DELETE FROM results WHERE nonce = 3")
    with closing(sqlite3.connect(filled)) as file:
        assert file.execute(COUNT).fetchone() == (2,)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://user:s3cret@Hook:9000/t0ken?key=s3cret#x", "http://hook:9000"),
        ("https://hook:443/", "https://hook"),
        ("http://[::1]:9", "http://[::1]:9"),
        ("hook:9000", None),
        ("hook", None),
        ("http://", None),
        ("http://hook:port", None),
    ],
)
def test_only_the_origin_of_a_url_is_shown(url: str, origin: str | None) -> None:
    assert origin_of(url) == origin
