"""The headers of a callback, and its signature, which proves its sender and its time."""

import hashlib
import hmac
from dataclasses import dataclass

KEY_HEADER = "Idempotency-Key"
SEQUENCE_HEADER = "X-Proofserve-Sequence"
TIMESTAMP_HEADER = "X-Proofserve-Timestamp"
SIGNATURE_HEADER = "X-Proofserve-Signature"
_VERSION = "v1"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is signed together with the body. ``timestamp`` in whole seconds since the epoch.

    With them, a recorded body cannot be sent again to another endpoint or as another callback.
    """

    endpoint: str
    key: str
    sequence: int
    timestamp: int

    def sign(self, secret: bytes, body: bytes) -> str:
        """The value of the signature header: HMAC-SHA-256, in hexadecimal.

        A large body takes a tenth of a second, during which other threads run.
        """
        parts = (_VERSION, self.timestamp, self.endpoint, self.key, self.sequence)
        head = "".join(f"{part}\n" for part in parts).encode()
        mac = hmac.new(secret, head, hashlib.sha256)
        mac.update(body)
        return f"{_VERSION}={mac.hexdigest()}"

    def matches(self, secret: bytes, body: bytes, signature: str) -> bool:
        """Whether ``signature`` is of this envelope and ``body``, found in constant time."""
        return hmac.compare_digest(self.sign(secret, body).encode(), signature.encode())
