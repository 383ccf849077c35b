"""The log of receipts as a node showed it to the client's side."""

from collections.abc import Callable, Mapping, Sequence

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.log import LogEntry, require_chain
from proofserve.protocol.receipts.signature import SignedEntry, is_signed
from proofserve.remote.recorder import now_ms
from proofserve.verifier.chat.conversation import Conversation, ReceiptClient
from proofserve.verifier.chat.findings import FailedCheck


class PublicLog:
    """Entries in a row, signed by ``public_key``; the first may be any. Raises as ``add``.

    ``seen_ms`` says when the client's side first saw an entry, by its own clock.
    """

    def __init__(
        self,
        entries: Sequence[SignedEntry],
        public_key: bytes,
        seen_ms: Mapping[int, int] | None = None,
    ) -> None:
        self.public_key = public_key
        self.seen_ms = dict(seen_ms or {})
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
            index, known = each.entry.index, self._entries.get(each.entry.index)
            if known is not None and known.hash != each.entry.hash:
                raise ProtocolError("log", f"it forks: the node showed another entry {index}")
            if known is None and not is_signed(each.entry.hash, each.signature, self.public_key):
                raise ProtocolError("entry_signature", f"entry {index} is not signed by this node")
        self._entries |= {each.entry.index: each.entry for each in shown}

    def require(self, entry: LogEntry) -> None:
        """Raise ProtocolError unless ``entry`` is the one in its place here."""
        known = self._entries.get(entry.index)
        if known is None:
            raise ProtocolError("log", f"it has no entry {entry.index}")
        if known.hash != entry.hash:
            raise ProtocolError("log", f"it forks: it has another entry {entry.index}")


class LogFollower:
    """Reads the log of the node at ``url``, from the first entry that a receipt needs.

    ``clock`` gives Unix time in milliseconds.
    """

    def __init__(self, url: str, clock: Callable[[], int] = now_ms) -> None:
        self._url = url
        self._clock = clock
        self._log: PublicLog | None = None

    def seen(self, chats: Sequence[Conversation]) -> PublicLog | FailedCheck | None:
        """The log with its new entries; None if no receipt yet was in one.

        A failure if the log forks, or its entries do not follow each other or are not signed by
        the key of the receipts. Raises NodeError and ReportedError as ``ReceiptClient``.
        """
        logged = [each for chat in chats for each in chat.receipts if each.inclusion]
        places = [each.inclusion.entry.index for each in logged if each.inclusion]
        if not places:
            return self._log
        needed = min(places)
        if self._log is not None and self._log.first is not None and self._log.last is not None:
            # Receipts do not come in the order of the log. The last known entry comes once more,
            # because the new ones have to follow it.
            needed = needed if needed < self._log.first else self._log.last
        with ReceiptClient(self._url) as node:
            entries = node.log(after=needed - 1)
        try:
            if self._log is None:
                self._log = PublicLog(entries, logged[0].public_key)
            else:
                self._log.add(entries)
        except ProtocolError as error:
            return FailedCheck("log", f"{self._url}: {error}")
        now = self._clock()
        for each in entries:
            self._log.seen_ms.setdefault(each.entry.index, now)
        return self._log
