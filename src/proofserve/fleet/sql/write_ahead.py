"""The write-ahead log of an SQLite file."""

import sqlite3
import time

_AGAIN_S = 0.02


def use_log(connection: sqlite3.Connection, longest_s: float) -> None:
    """Switch the file to the log; it keeps that. Raises sqlite3.Error.

    SQLite refuses this at once, whatever the connection's timeout, while another process writes
    without the log or switches too: processes that start at the same moment. It is tried for
    ``longest_s`` seconds.
    """
    deadline = time.monotonic() + longest_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        else:
            return
        time.sleep(_AGAIN_S)
