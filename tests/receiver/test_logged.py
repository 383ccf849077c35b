"""Entries of public logs: over HTTP, in the file, and as a validator reads them."""

import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proofserve.outbox.planning import CallbackPolicy
from proofserve.outbox.sender import CallbackSender
from proofserve.outbox.store import SqliteOutbox
from proofserve.protocol.receipts.record import SigningKey
from proofserve.receiver import reader
from proofserve.receiver.reader import ReceiverFileError
from receipts.support import an_answer, logged, running
from support.fake_engine import FakeEngine
from support.logs import chain, posted, signed_entries

KEY = SigningKey.new()
TO_THE_END = 2**63 - 1


def post(client: httpx.Client, key: str, body: dict[str, Any]) -> str:
    answer = client.post("/logged", json=body, headers={"Idempotency-Key": key})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["status"])


def stored(path: Path, key: SigningKey = KEY, first: int = 0, last: int = TO_THE_END) -> list[Any]:
    with reader.reading(path) as received:
        return [entry for entry, _ in received.log(key.public_key, first, last)]


def test_entries_are_stored_once(client: httpx.Client, path: Path) -> None:
    entries = chain(5)
    assert post(client, "a", posted(KEY, entries[:3])) == "stored"
    assert post(client, "a", posted(KEY, entries[:3])) == "duplicate"
    # The same entries in another callback: the receiver was away, say, and its file was restored.
    assert post(client, "b", posted(KEY, entries[1:])) == "stored"
    other = SigningKey.new()
    assert post(client, "c", posted(other, chain(1, "other"))) == "stored"
    assert stored(path) == signed_entries(KEY, entries)
    assert stored(path, first=1, last=3) == signed_entries(KEY, entries[1:4])
    assert stored(path, other) == signed_entries(other, chain(1, "other"))
    summary = client.get("/summary").json()
    assert (summary["callbacks"], summary["repeats"], summary["forks"]) == (3, 1, 0)
    with closing(sqlite3.connect(path)) as file:
        rows = file.execute("SELECT number, hash, received_at, fork FROM log_entries").fetchall()
    assert len(rows) == 6
    assert {row[2:] for row in rows} == {(1e9, 0)}
    assert {row[:2] for row in rows} >= {(each.index, each.hash) for each in entries}


def test_a_fork_is_stored_too_logged_and_counted(
    client: httpx.Client, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries = chain(4)
    branch = chain(2, "b", entries[1])
    post(client, "a", posted(KEY, entries))
    with caplog.at_level(logging.ERROR, "proofserve"):
        assert post(client, "b", posted(KEY, branch)) == "stored"
        said = [(one.levelname, one.getMessage()) for one in caplog.records]
        # What is known makes no second fork.
        assert post(client, "c", posted(KEY, [*branch, *entries])) == "stored"
    name = f"the log of receipts of {KEY.public_key.hex()} forks: it has another entry"
    assert said == [("ERROR", f"{name} 2"), ("ERROR", f"{name} 3")]
    assert len(caplog.records) == 2
    assert client.get("/summary").json()["forks"] == 2
    assert len(stored(path)) == 6
    with reader.reading(path) as received:
        from_0, from_3 = (received.forked(KEY.public_key, first) for first in (0, 3))
        assert received.forked(SigningKey.new().public_key, 0) == []
    assert {each.entry for each in from_0} == {*entries[2:], *branch}
    assert {each.entry for each in from_3} == {entries[3], branch[1]}


def test_an_entry_of_another_key_is_no_fork(client: httpx.Client) -> None:
    post(client, "a", posted(KEY, chain(2)))
    post(client, "b", posted(SigningKey.new(), chain(2, "b")))
    assert client.get("/summary").json()["forks"] == 0


def test_two_entries_of_one_callback_are_a_fork(client: httpx.Client) -> None:
    post(client, "a", posted(KEY, [*chain(1), *chain(1, "b")]))
    assert client.get("/summary").json()["forks"] == 1


def _with(change: dict[str, Any], place: int = 1, part: str | None = None) -> dict[str, Any]:
    body = posted(KEY, chain(2))
    changed = body["entries"][place] if part is None else body["entries"][place][part]
    changed.update(change)
    return body


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (_with({"entry_signature": "00" * 64}), ["entries", 1, "entry_signature"]),
        (_with({"count": 2}, 0, "entry"), ["entries", 0, "entry_signature"]),
        (
            posted(KEY, chain(2)) | {"public_key": SigningKey.new().public_key.hex()},
            ["entries", 0, "entry_signature"],
        ),
        (_with({"entry_signature": "00"}), ["entries", 1, "entry_signature"]),
        (_with({"root": "zz" * 32}, part="entry"), ["entries", 1, "entry", "root"]),
        (_with({"index": "1"}, part="entry"), ["entries", 1, "entry", "index"]),
        (_with({"index": 2**63}, part="entry"), ["entries", 1, "entry", "index"]),
        (_with({"news": 1}, part="entry"), ["entries", 1, "entry", "news"]),
        (posted(KEY, []), ["entries"]),
        (posted(KEY, chain(1)) | {"public_key": "k3y"}, ["public_key"]),
    ],
)
def test_422_names_the_field(client: httpx.Client, body: dict[str, Any], field: list[Any]) -> None:
    answer = client.post("/logged", json=body)
    assert answer.status_code == 422
    assert [one["loc"] for one in answer.json()["detail"]] == [["body", *field]]
    assert client.get("/summary").json()["callbacks"] == 0


def test_it_takes_what_a_node_posts(url: str, path: Path, tmp_path: Path) -> None:
    async def serve() -> tuple[bytes, list[Any]]:
        policy = CallbackPolicy(backoff_first_s=0.05, max_retries=0)
        engine = FakeEngine()
        async with (
            await SqliteOutbox.open(tmp_path / "outbox.sqlite") as outbox,
            running(outbox, engine, url) as service,
            anyio.create_task_group() as tasks,
        ):
            sender = CallbackSender(outbox, policy)
            tasks.start_soon(sender.run)
            for n in range(3):
                engine.answers.put_nowait(an_answer(f"chatcmpl-{n}"))
                await logged(service, n + 1)
            with anyio.fail_after(60):
                while len(of_key(service.public_key)) < 3:  # noqa: ASYNC110 - it reads a file
                    await anyio.sleep(0.02)
            entries = await service.entries(-1, 10)
            tasks.cancel_scope.cancel()
        return service.public_key, entries

    def of_key(key: bytes) -> list[Any]:
        with reader.reading(path) as received:
            return [entry for entry, _ in received.log(key, 0, TO_THE_END)]

    key, entries = anyio.run(serve)
    assert len(entries) == 3
    assert of_key(key) == entries


@pytest.mark.parametrize("body", ["{", "{}", "[]"])
def test_a_damaged_entry_is_refused(client: httpx.Client, path: Path, body: str) -> None:
    post(client, "a", posted(KEY, chain(1)))
    with closing(sqlite3.connect(path)) as file:
        file.execute("UPDATE log_entries SET body = ?", (body,))
        file.commit()
    with pytest.raises(ReceiverFileError, match="damaged"):
        stored(path)
