"""The server moves a damaged outbox file aside and starts with a new one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from proofserve.outbox.store import SqliteOutbox
from proofserve.rounds.errors import OutboxUnavailable

from .support import FastClock, a_spec, artifacts

pytestmark = pytest.mark.anyio

PAGE = 4096


def read(path: Path) -> bytes:
    return path.read_bytes()


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def files_of(path: Path) -> list[str]:
    """The names of the outbox file and of the files beside it."""
    return sorted(each.name for each in path.parent.iterdir())


async def filled(path: Path, clock: FastClock) -> bytes:
    async with await SqliteOutbox.open(path, clock) as store:
        await store.open_round(a_spec())
        for index in range(40):
            first = index * 50
            await store.record("r1", first + 50, artifacts(*range(first, first + 50)), {})
    return read(path)


def head(content: bytes) -> bytes:
    """Overwrite the list of tables."""
    return content[:100] + b"\xff" * (PAGE - 100) + content[PAGE:]


def middle(content: bytes) -> bytes:
    """Overwrite a page of results."""
    return content[: 20 * PAGE] + b"\xff" * PAGE + content[21 * PAGE :]


def tail(content: bytes) -> bytes:
    """Cut the file at its half."""
    return content[: len(content) // 2 // PAGE * PAGE]


@pytest.mark.parametrize("corrupt", [head, middle, tail])
async def test_a_damaged_file_is_moved_aside_unchanged(
    corrupt: Callable[[bytes], bytes],
    path: Path,
    clock: FastClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = corrupt(await filled(path, clock))
    write(path, broken)
    async with await SqliteOutbox.open(path, clock) as store:
        assert await store.results(0, 10) == []
        await store.open_round(a_spec())
        await store.record("r1", 1, artifacts(3), {})
    kept = path.with_name("outbox.sqlite.damaged-1")
    assert read(kept) == broken
    (message,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert str(path) in message
    assert str(kept) in message
    async with await SqliteOutbox.open(path, clock) as store:
        assert [row.nonce for row in await store.results(0, 10)] == [3]


async def test_the_log_of_a_killed_server_is_kept_beside_the_damaged_file(
    path: Path, clock: FastClock
) -> None:
    killed = path.with_name("killed.sqlite")
    await filled(path, clock)
    async with await SqliteOutbox.open(path, clock) as store:
        await store.record("r1", 2001, artifacts(2000), {})
        # The files on disk are now those that a kill of this process would leave.
        write(killed, middle(read(path)))
        write(killed.with_name("killed.sqlite-wal"), read(path.with_name(f"{path.name}-wal")))
    parts = [killed, killed.with_name("killed.sqlite-wal")]
    broken, changes = map(read, parts)
    await (await SqliteOutbox.open(killed, clock)).close()
    assert read(path.with_name("killed.sqlite.damaged-1")) == broken
    assert read(path.with_name("killed.sqlite.damaged-1-wal")) == changes


async def test_a_second_damaged_file_does_not_overwrite_the_first(
    path: Path, clock: FastClock
) -> None:
    content = head(await filled(path, clock))
    for number in (1, 2):
        write(path, content + bytes(PAGE * number))
        write(path.with_name(f"{path.name}-wal"), b"changes %d" % number)
        await (await SqliteOutbox.open(path, clock)).close()
        kept = path.with_name(f"outbox.sqlite.damaged-{number}")
        assert read(kept) == content + bytes(PAGE * number)
    assert read(path.with_name("outbox.sqlite.damaged-1")) == content + bytes(PAGE)


async def test_a_file_that_is_not_an_outbox_is_not_moved(path: Path, clock: FastClock) -> None:
    write(path, b"a letter to a friend " * 500)
    with pytest.raises(OutboxUnavailable, match="file is not a database"):
        await SqliteOutbox.open(path, clock)
    assert read(path) == b"a letter to a friend " * 500
    assert files_of(path) == [path.name]


async def test_an_intact_file_is_not_moved(path: Path, clock: FastClock) -> None:
    await filled(path, clock)
    async with await SqliteOutbox.open(path, clock) as store:
        assert len(await store.results(0, 5000)) == 2000
    assert not [name for name in files_of(path) if "damaged" in name]
