"""An outbox belongs to one server at a time.

A second one would end the round of the first, and send all that it has once more.
"""

import fcntl
from pathlib import Path
from typing import BinaryIO

from proofserve.rounds.errors import OutboxUnavailable


class OutboxInUse(OutboxUnavailable):
    """Another server works with it. It was not touched."""


def claim(path: Path) -> BinaryIO:
    """Keep other servers off ``path`` until the file given back is closed, or this process ends.

    Raises:
        OutboxInUse: somebody else has claimed it.
        OutboxUnavailable: the file of the lock cannot be written.
    """
    # A file of its own: SQLite's locks are lost when anybody in the process closes the database's.
    lock = path.with_name(f"{path.name}.lock")
    try:
        file = lock.open("ab")
    except OSError as error:
        raise OutboxUnavailable(f"the outbox {path} failed: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise OutboxInUse(
                f"the outbox {path} belongs to another server that runs: end that one,"
                " or give this one a file of its own with POC_OUTBOX"
            ) from error
        raise OutboxUnavailable(f"the outbox {path} failed: {error}") from error
    return file
