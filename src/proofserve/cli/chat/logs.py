"""The public log that receipts have to be in: a node's own, or as a receiver stored it."""

from collections.abc import Sequence
from pathlib import Path

from proofserve.lab.chat.chat_tokens import FailedCheck
from proofserve.lab.chat.conversation import Conversation
from proofserve.lab.chat.following import LogFollower
from proofserve.lab.chat.public_log import PublicLog
from proofserve.lab.client.errors import LabError
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.signature import SignedEntry, SignedReceipt, is_signed
from proofserve.receiver import reader
from proofserve.receiver.reader import ReceiverFileError


def seen_log(
    source: str, chats: Sequence[Conversation], public_key: bytes | None
) -> PublicLog | FailedCheck | None:
    """The log at ``source``, as far as ``chats`` need it; None if they have no logged receipt.

    ``source`` is the URL of a node or the SQLite file of ``proofserve receive``. A failure if the
    log forks or its entries do not follow each other. Raises LabError if it cannot be read, and if
    a file lacks an entry: the node may have been unable to reach the receiver.
    """
    if "://" in source:
        return LogFollower(source).seen(chats)
    receipts = _logged(chats, public_key)
    if not receipts:
        return None
    path = Path(source)
    try:
        if not reader.is_database(path):
            raise LabError(f"--log: {path} is neither a URL nor a file of `proofserve receive`")
        return _received_log(path, receipts)
    except OSError as error:
        text = f"--log: {path} is no URL, and as a file it cannot be read: {error.strerror}"
        raise LabError(text) from error
    except ReceiverFileError as error:
        raise LabError(f"--log: {error}") from error


def _logged(chats: Sequence[Conversation], public_key: bytes | None) -> list[SignedReceipt]:
    """The receipts with a signed entry; all others fail whatever the log has."""
    return [
        each
        for chat in chats
        for each in chat.receipts
        if each.inclusion is not None
        and public_key in {None, each.public_key}
        and is_signed(each.inclusion.entry.hash, each.entry_signature or b"", each.public_key)
    ]


def _received_log(path: Path, receipts: Sequence[SignedReceipt]) -> PublicLog | FailedCheck:
    """The part of the log in ``path`` between the first and the last entry of ``receipts``."""
    keys = {each.public_key for each in receipts}
    if len(keys) > 1:
        raise LabError("--log: the receipts are of several nodes; give those of one at a time")
    (key,) = keys
    places = [each.inclusion.entry.index for each in receipts if each.inclusion]
    first, last = min(places), max(places)
    with reader.reading(path) as received:
        forked = received.forked(key, first)
        entries = received.log(key, first, last)
    _require_signed(path, (*forked, *entries), key)
    if (index := _fork(forked)) is not None:
        return FailedCheck("log", f"{path}: it forks: the node signed two entries {index}")
    _require_all(path, entries, first, last)
    try:
        return PublicLog(tuple(entries), key)
    except ProtocolError as error:
        return FailedCheck("log", f"{path}: {error}")


def _require_signed(path: Path, entries: Sequence[SignedEntry], key: bytes) -> None:
    # A receiver stores signed entries only, so another one is the file's fault, not the node's.
    for each in entries:
        if not is_signed(each.entry.hash, each.signature, key):
            index = each.entry.index
            raise LabError(f"--log: {path} is damaged: entry {index} is not signed by its node")


def _fork(entries: Sequence[SignedEntry]) -> int | None:
    hashes: dict[int, bytes] = {}
    for each in entries:
        if hashes.setdefault(each.entry.index, each.entry.hash) != each.entry.hash:
            return each.entry.index
    return None


def _require_all(path: Path, entries: Sequence[SignedEntry], first: int, last: int) -> None:
    there = {each.entry.index for each in entries}
    if len(there) == last - first + 1:
        return
    # Indices of a damaged receipt may be far apart: count up to the first gap only.
    missing = first
    while missing in there:
        missing += 1
    raise LabError(
        f"--log: {path} has no entry {missing} of the node's log, which these receipts need;"
        " read the log from the node: --log URL"
    )
