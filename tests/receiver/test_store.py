import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from proofserve.receiver.callbacks import Generated, Validated
from proofserve.receiver.reader import ReceiverFileError
from proofserve.receiver.store import ClaimSource, ReceiverStore, Summary

from .support import generated, validated


def test_callbacks_are_stored_and_counted_for_each_source(store: ReceiverStore) -> None:
    assert store.summary() == Summary(0, 0, None, ())
    store.add_generated(Generated(**generated(3, 7)), key="a", sequence=1)
    store.add_generated(Generated(**generated(3, block_hash="other")), key="b", sequence=2)
    store.add_validated(Validated(**validated()), key="c", sequence=3)
    store.add_validated(Validated(**validated(fraud_detected=False)))
    assert store.summary() == Summary(
        4,
        0,
        1e9,
        (
            ClaimSource("k3y", "b10c", 2, 0, 0, 2, 1, 1e9),
            ClaimSource("k3y", "other", 1, 0, 0, 0, 0, 1e9),
        ),
    )


def test_a_callback_with_a_known_key_is_not_stored_again(store: ReceiverStore) -> None:
    assert store.add_generated(Generated(**generated(3)), key="a")
    assert not store.add_generated(Generated(**generated(3)), key="a")
    assert store.add_validated(Validated(**validated()), key="b")
    assert not store.add_validated(Validated(**validated()), key="b")
    summary = store.summary()
    assert (summary.callbacks, summary.repeats) == (2, 2)
    assert summary.sources == (ClaimSource("k3y", "b10c", 1, 0, 0, 1, 1, 1e9),)


def test_a_nonce_under_another_key_is_a_duplicate(store: ReceiverStore) -> None:
    store.add_generated(Generated(**generated(3, 7)), key="a")
    store.add_generated(Generated(**generated(7, 11)), key="b")
    store.add_generated(Generated(**generated(13, 13)))
    store.add_generated(Generated(**generated()))
    (source,) = store.summary().sources
    assert (source.artifacts, source.duplicates) == (4, 2)


def test_everything_is_there_after_reopening(path: Path) -> None:
    store = ReceiverStore.open(path)
    store.add_generated(Generated(**generated(3)), key="a", sequence=9)
    before = store.summary()
    store.close()
    store = ReceiverStore.open(path)
    assert store.summary() == before
    assert not store.add_generated(Generated(**generated(3)), key="a", sequence=9)
    store.close()
    with closing(sqlite3.connect(path)) as file:
        rows = file.execute("SELECT block_hash, public_key, nonce FROM artifacts").fetchall()
        assert rows == [("b10c", "k3y", 3)]
        assert file.execute("SELECT sequence, repeats FROM callbacks").fetchall() == [(9, 1)]


def test_a_callback_that_fails_half_way_leaves_nothing(path: Path, store: ReceiverStore) -> None:
    with closing(sqlite3.connect(path)) as file:
        file.execute("DROP TABLE sources")
        with pytest.raises(sqlite3.Error, match="sources"):
            store.add_generated(Generated(**generated(3)), key="a")
        assert file.execute("SELECT count(*) FROM callbacks").fetchone() == (0,)
        assert file.execute("SELECT count(*) FROM artifacts").fetchone() == (0,)


def test_the_summary_does_not_wait_for_a_callback(path: Path, store: ReceiverStore) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        # A lock held elsewhere keeps the callback waiting, as a large one would.
        other.execute("BEGIN IMMEDIATE")
        body = Generated(**generated(3))
        thread = threading.Thread(target=store.add_generated, args=(body,))
        thread.start()
        assert store.summary().callbacks == 0
        assert thread.is_alive()
        other.execute("ROLLBACK")
        thread.join()
    assert store.summary().callbacks == 1


def test_files_that_are_not_a_book_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ReceiverFileError, match="unable to open"):
        ReceiverStore.open(tmp_path)
    with pytest.raises(ReceiverFileError, match="not a database"):
        ReceiverStore.open(Path(__file__))
    with closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE recipes (name)")
        with pytest.raises(ReceiverFileError, match="another program"):
            ReceiverStore.open(path)
        for version, complaint in ((5, "reads up to 4"), (3, "reads 4 only")):
            file.execute(f"PRAGMA user_version = {version}")
            with pytest.raises(
                ReceiverFileError, match=f"has version {version}, this proofserve {complaint}"
            ):
                ReceiverStore.open(path)
