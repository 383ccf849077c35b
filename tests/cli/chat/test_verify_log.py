"""``proofserve verify-chat --log`` with the file of a receiver."""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.cli.model import SmallModel, checkpoint
from proofserve.cli.validator.chat import seen_log
from proofserve.engines.checkpoints import weights_digest
from proofserve.engines.reference.network import load
from proofserve.protocol.receipts.record import LogEntry, SigningKey, inclusions, next_entry
from proofserve.receiver.store import ReceiverStore
from proofserve.reports import ReportedError
from proofserve.verifier.chat.conversation import Conversation, PublicLog, write
from proofserve.verifier.chat.statements import FailedCheck
from proofserve.verifier.validator import CheckpointTokenizer
from support.chats import KEY, Writer
from support.four_bits import one_thread
from support.logs import chain, signed_entries


@pytest.fixture(scope="module", autouse=True)
def few_threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def trained() -> Path:
    return checkpoint(SmallModel("trained"))


@pytest.fixture(scope="module")
def chats(trained: Path) -> list[Conversation]:
    """Two chats; the second one's entry is two after the first one's."""
    writer = Writer(
        load(trained, "bfloat16", "cpu"), CheckpointTokenizer(trained), weights_digest(trained)
    )
    first, second = writer.chats(range(2), tokens=8)
    one = next_entry(None, [first.receipts[0].receipt.digest], first.receipts[0].receipt.created_ms)
    (between,) = chain(1, before=one)
    digests = [second.receipts[0].receipt.digest]
    return [_placed(first, one), _placed(second, next_entry(between, digests, between.time_ms))]


def _placed(chat: Conversation, entry: LogEntry, key: SigningKey = KEY) -> Conversation:
    (signed,) = chat.receipts
    digest = signed.receipt.digest
    (found,) = inclusions(entry, [digest])
    signature = key.sign(entry.hash)
    moved = replace(
        signed,
        public_key=key.public_key,
        signature=key.sign(digest),
        inclusion=found,
        entry_signature=signature,
    )
    return replace(chat, receipts=(moved,))


def entry_of(chat: Conversation) -> LogEntry:
    found = chat.receipts[0].inclusion
    assert found is not None
    return found.entry


@pytest.fixture
def log(chats: Sequence[Conversation]) -> list[LogEntry]:
    """The log of the node, with one entry behind the last that the chats need."""
    first, last = map(entry_of, chats)
    return [first, *chain(1, before=first), last, *chain(1, "later", last)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "received.sqlite"


def receive(path: Path, *entries: LogEntry, key: SigningKey = KEY) -> str:
    """Store entries as the receiver does; the file's name."""
    with closing(ReceiverStore.open(path)) as store:
        assert store.add_logged(key.public_key, signed_entries(key, entries))
    return str(path)


def verify(
    folder: Path, model: Path, chats: Sequence[Conversation], *args: str
) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output, and the record."""
    files = [folder / f"{chat.name}.json" for chat in chats]
    for file, chat in zip(files, chats, strict=True):
        write(file, chat)
    out = folder / "verdict.json"
    argv = ["verify-chat", *map(str, files), "--model", str(model), "--json", str(out), *args]
    found = CliRunner().invoke(app, argv)
    return found.exit_code, found.output, json.loads(out.read_text()) if out.exists() else {}


# -- the command -------------------------------------------------------------------------------


def test_the_receivers_log_has_the_receipts(
    chats: list[Conversation], log: list[LogEntry], path: Path, trained: Path
) -> None:
    code, said, found = verify(path.parent, trained, chats, "--log", receive(path, *log))
    # 16 tokens are too few for a verdict, and none of them is held against the node.
    assert (code, found["failures"], found["answers"]) == (2, [], 2), said


def test_a_log_that_forks_convicts(
    chats: list[Conversation], log: list[LogEntry], path: Path, trained: Path
) -> None:
    source = receive(path, *log, *chain(2, "b", log[0]))
    code, said, found = verify(path.parent, trained, chats, "--log", source)
    assert (code, found["verdict"]) == (1, "fraud"), said
    assert {each["check"] for each in found["failures"]} == {"log"}
    assert "it forks: the node signed two entries 1" in said


def test_another_entry_at_the_receiver_convicts(
    chats: list[Conversation], path: Path, trained: Path
) -> None:
    source = receive(path, *chain(1, "b"))
    code, said, found = verify(path.parent, trained, chats[:1], "--log", source)
    assert (code, found["verdict"]) == (1, "fraud"), said
    assert "it forks: it has another entry 0" in said


def test_a_file_without_the_entry_gives_no_verdict(
    chats: list[Conversation], log: list[LogEntry], path: Path, trained: Path
) -> None:
    source = receive(path, log[0], log[1])
    code, said, found = verify(path.parent, trained, chats, "--log", source)
    assert (code, found) == (3, {})
    assert "has no entry 2 of the node's log" in said


# -- reading the log ---------------------------------------------------------------------------


def test_the_part_that_the_receipts_need_is_read(
    chats: list[Conversation], log: list[LogEntry], path: Path
) -> None:
    source = receive(path, *log)
    for first, last in ((0, 1), (1, 2), (0, 2)):
        seen = seen_log(source, chats[first:last], None)
        assert isinstance(seen, PublicLog)
        needed = log[entry_of(chats[first]).index : entry_of(chats[last - 1]).index + 1]
        assert (seen.first, seen.last, len(seen)) == (
            needed[0].index,
            needed[-1].index,
            len(needed),
        )
    without = replace(chats[0], receipts=(replace(chats[0].receipts[0], inclusion=None),))
    assert seen_log(source, [without], None) is None


def test_a_fork_counts_from_the_first_needed_entry(
    chats: list[Conversation], log: list[LogEntry], path: Path
) -> None:
    source = receive(path, *log, *chain(1, "b"))
    assert isinstance(seen_log(source, chats, None), FailedCheck)
    assert isinstance(seen_log(source, chats[1:], None), PublicLog)
    receive(path, *chain(1, "b", log[2]))
    assert isinstance(seen_log(source, chats[1:], None), FailedCheck)


def test_entries_that_do_not_follow_each_other_are_a_failure(
    chats: list[Conversation], log: list[LogEntry], path: Path
) -> None:
    other = replace(log[1], count=2)
    found = seen_log(receive(path, log[0], other, *log[2:]), chats, None)
    assert isinstance(found, FailedCheck)
    assert (found.check, "entry 2 does not follow 1" in found.text) == ("log", True)


@pytest.mark.parametrize("forked", [False, True])
def test_an_unsigned_entry_is_the_files_fault(
    chats: list[Conversation], log: list[LogEntry], path: Path, forked: bool
) -> None:
    source = receive(path, *log, *(chain(1, "b", log[0]) if forked else ()))
    with closing(sqlite3.connect(path)) as file:
        (body,) = file.execute("SELECT body FROM log_entries WHERE number = 1").fetchone()
        changed = body.replace('"count": 1', '"count": 2')
        assert changed != body
        file.execute("UPDATE log_entries SET body = ? WHERE body = ?", (changed, body))
        file.commit()
    with pytest.raises(ReportedError, match="damaged: entry 1 is not signed by its node"):
        seen_log(source, chats, None)


def test_the_same_entry_twice_is_no_fork(
    chats: list[Conversation], log: list[LogEntry], path: Path
) -> None:
    """A file that was altered to look like a fork convicts no node."""
    source = receive(path, *log, *chain(1, "b", log[2]))
    with closing(sqlite3.connect(path)) as file:
        query = "SELECT body FROM log_entries WHERE number = 3 AND fork = 0"
        (body,) = file.execute(query).fetchone()
        file.execute("UPDATE log_entries SET body = ? WHERE number = 3", (body,))
        file.commit()
    assert isinstance(seen_log(source, chats, None), PublicLog)


def test_receipts_of_several_nodes_need_a_key(
    chats: list[Conversation], log: list[LogEntry], path: Path
) -> None:
    source = receive(path, *log)
    other = _placed(chats[1], log[2], SigningKey.new())
    with pytest.raises(ReportedError, match="several nodes"):
        seen_log(source, [chats[0], other], None)
    found = seen_log(source, [chats[0], other], KEY.public_key)
    assert isinstance(found, PublicLog)
    assert (found.first, found.last) == (log[0].index, log[0].index)


def test_a_receipt_with_a_forged_entry_does_not_hide_the_others(
    chats: list[Conversation], log: list[LogEntry], path: Path
) -> None:
    """It fails the check of its signature; the index that it names is not looked for."""
    (signed,) = chats[1].receipts
    assert signed.inclusion is not None
    far = replace(signed.inclusion, entry=replace(signed.inclusion.entry, index=2**62))
    forged = replace(chats[1], receipts=(replace(signed, inclusion=far),))
    found = seen_log(receive(path, *log), [chats[0], forged], None)
    assert isinstance(found, PublicLog)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is no URL, and as a file it cannot be read: No such file"),
        (b"{}", "is neither a URL nor a file of `proofserve receive`"),
        (b"SQLite format 3\0 and nothing", "is not a file of `proofserve receive`"),
    ],
)
def test_other_files_are_refused(
    chats: list[Conversation], path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ReportedError, match=message):
        seen_log(str(path), chats, None)
