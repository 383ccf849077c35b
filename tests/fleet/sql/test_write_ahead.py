"""Processes that start at the same moment on a new SQLite file."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from proofserve.fleet.sql.database import use_log


def mode_of(connection: sqlite3.Connection) -> str:
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    return str(mode)


def test_the_switch_waits_for_a_process_that_writes_without_the_log(tmp_path: Path) -> None:
    file = tmp_path / "fleet.sqlite"
    with (
        closing(sqlite3.connect(file, isolation_level=None, check_same_thread=False)) as writer,
        closing(sqlite3.connect(file, isolation_level=None)) as second,
    ):
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("CREATE TABLE t (x)")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            use_log(second, 0.05)
        ending = threading.Timer(0.2, writer.execute, ["COMMIT"])
        ending.start()
        use_log(second, 30.0)
        ending.join()
        assert mode_of(second) == "wal"


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "fleet.sqlite"
    with closing(sqlite3.connect(file)) as made:
        made.execute("CREATE TABLE t (x)")
    with (
        closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as reader,
        pytest.raises(sqlite3.OperationalError, match="readonly"),
    ):
        use_log(reader, 1e9)
