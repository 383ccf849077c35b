"""Request ids: the client's own if it is fit for a log, else a new one."""

import os
import re

HEADER = b"x-request-id"
# Characters with which a client cannot forge a log line.
_REQUEST_ID = re.compile(rb"[\w.:+/=-]{1,128}", re.ASCII)


def request_id_of(given: bytes | None) -> bytes:
    """``given``, the client's id, if it is fit for a log line; else a new id.

    A new id cannot be guessed: the id of an answer is made of it, and opens the answer's receipt.
    """
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return os.urandom(16).hex().encode()
