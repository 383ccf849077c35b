"""Signed answers: what a node said to one request, by which a third party can hold it to that."""

import base64
import binascii
import hashlib
import re
import time
from dataclasses import dataclass
from typing import Final

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import SigningKey, is_signed

ANSWER_HEADER: Final = "X-Proofserve-Answer"
_DOMAIN: Final = b"proofserve answer-v1\0"
_FORM: Final = re.compile(r"t=(\d{1,16}), key=([0-9a-f]{64}), signature=([A-Za-z0-9+/]{86}==)")


@dataclass(frozen=True, slots=True)
class SignedAnswer:
    """The ``body`` of a successful answer to ``method`` ``target`` with the body ``request``.

    ``target`` is the path with its query, ``time_ms`` Unix time by the node's clock. The signature
    is of ``public_key`` over ``digest``; nothing is verified by making this record.
    """

    method: str
    target: str
    request: bytes
    body: bytes
    time_ms: int
    public_key: bytes
    signature: bytes

    @property
    def digest(self) -> bytes:
        """SHA-256 of the domain and every field, each behind its length as u32 LE: 32 bytes."""
        return _digest(self.method, self.target, self.request, self.body, self.time_ms)

    @property
    def is_signed(self) -> bool:
        return is_signed(self.digest, self.signature, self.public_key)


def answer_header(key: SigningKey, method: str, target: str, request: bytes, body: bytes) -> str:
    """The value of ``ANSWER_HEADER`` for an answer of now."""
    time_ms = int(time.time() * 1000)
    signature = key.sign(_digest(method, target, request, body, time_ms))
    text = base64.b64encode(signature).decode("ascii")
    return f"t={time_ms}, key={key.public_key.hex()}, signature={text}"


def answer_with(header: str, method: str, target: str, request: bytes, body: bytes) -> SignedAnswer:
    """The answer that came with ``header``. Raises ProtocolError for one in another form."""
    if (found := _FORM.fullmatch(header)) is None:
        raise ProtocolError("signature", f"{ANSWER_HEADER} is not t=, key=, signature=")
    try:
        signature = base64.b64decode(found[3], validate=True)
    except binascii.Error as error:
        raise ProtocolError("signature", "is not base64") from error
    key = bytes.fromhex(found[2])
    return SignedAnswer(method, target, request, body, int(found[1]), key, signature)


def _digest(method: str, target: str, request: bytes, body: bytes, time_ms: int) -> bytes:
    made = hashlib.sha256(_DOMAIN)
    fields = (method.encode(), target.encode(), request, body, time_ms.to_bytes(8, "little"))
    for field in fields:
        made.update(len(field).to_bytes(4, "little"))
        made.update(field)
    return made.digest()
