"""Follows the public log of a node, as receipts need it."""

from collections.abc import Sequence

from proofserve.lab.chat.chat_tokens import FailedCheck
from proofserve.lab.chat.collecting import ReceiptClient
from proofserve.lab.chat.conversation import Conversation
from proofserve.lab.chat.public_log import PublicLog
from proofserve.protocol.errors import ProtocolError


class LogFollower:
    """Reads the log of the node at ``url``, from the first entry that a receipt needs."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._log: PublicLog | None = None

    def seen(self, chats: Sequence[Conversation]) -> PublicLog | FailedCheck | None:
        """The log with its new entries; None if no receipt yet was in one.

        A failure if the log forks, or its entries do not follow each other or are not signed by
        the key of the receipts. Raises NodeError and LabError as ``ReceiptClient``.
        """
        logged = [each for chat in chats for each in chat.receipts if each.inclusion]
        places = [each.inclusion.entry.index for each in logged if each.inclusion]
        if not places:
            return self._log
        with ReceiptClient(self._url) as node:
            entries = node.log(after=self._from(min(places)) - 1)
        try:
            if self._log is None:
                self._log = PublicLog(entries, logged[0].public_key)
            else:
                self._log.add(entries)
        except ProtocolError as error:
            return FailedCheck("log", f"{self._url}: {error}")
        return self._log

    def _from(self, needed: int) -> int:
        """The last known entry once more, for the new ones have to follow it, or an earlier one.

        Receipts do not come in the order of the log.
        """
        if self._log is None or self._log.first is None or self._log.last is None:
            return needed
        return needed if needed < self._log.first else self._log.last
