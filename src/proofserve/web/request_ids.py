"""Request ids: the client's own if it is fit for a log, else a new one."""

import itertools
import os
import re

HEADER = b"x-request-id"
# Characters with which a client cannot forge a log line.
_REQUEST_ID = re.compile(rb"[\w.:+/=-]{1,128}", re.ASCII)


class RequestIds:
    """Makes ids for requests that have none: a random prefix and a number."""

    def __init__(self) -> None:
        self._prefix = os.urandom(8).hex().encode()
        self._numbers = itertools.count()

    def of(self, given: bytes | None) -> bytes:
        """``given``, the client's id, if it is fit for a log line; else a new id."""
        if given is not None and _REQUEST_ID.fullmatch(given):
            return given
        return b"%s-%x" % (self._prefix, next(self._numbers))
