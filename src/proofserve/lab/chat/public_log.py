"""The log of receipts that a node publishes, as a validator saw it."""

from collections.abc import Sequence

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.log import LogEntry, require_chain
from proofserve.protocol.receipts.signature import SignedEntry, is_signed


class PublicLog:
    """Entries that follow each other, signed by ``public_key``; the first may be any.

    Raises ProtocolError as ``add``.
    """

    def __init__(self, entries: Sequence[SignedEntry], public_key: bytes) -> None:
        self.public_key = public_key
        self._entries: dict[int, LogEntry] = {}
        self.add(entries)

    @property
    def first(self) -> int | None:
        """The least index; None without entries."""
        return min(self._entries, default=None)

    @property
    def last(self) -> int | None:
        return max(self._entries, default=None)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, shown: Sequence[SignedEntry]) -> None:
        """Add ``shown``, which have the last known entry among them.

        Raises ProtocolError, and adds nothing, if they do not follow each other, a signature is
        not the node's, the node now shows another entry in the place of a known one (the log
        forks), or the last known one is gone.
        """
        require_chain([each.entry for each in shown])
        places = {each.entry.index for each in shown}
        if self.last is not None and self.last not in places:
            raise ProtocolError("log", f"it forks: entry {self.last} is gone")
        for each in shown:
            self._require_new_or_same(each)
        self._entries |= {each.entry.index: each.entry for each in shown}

    def require(self, entry: LogEntry) -> None:
        """Raise ProtocolError unless ``entry`` is the one in its place here."""
        known = self._entries.get(entry.index)
        if known is None:
            raise ProtocolError("log", f"it has no entry {entry.index}")
        if known.hash != entry.hash:
            raise ProtocolError("log", f"it forks: it has another entry {entry.index}")

    def _require_new_or_same(self, shown: SignedEntry) -> None:
        index = shown.entry.index
        known = self._entries.get(index)
        if known is not None:
            if known.hash != shown.entry.hash:
                raise ProtocolError("log", f"it forks: the node showed another entry {index}")
        elif not is_signed(shown.entry.hash, shown.signature, self.public_key):
            raise ProtocolError("entry_signature", f"entry {index} is not signed by this node")
