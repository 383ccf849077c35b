"""Ed25519 signatures of receipts and of the log's entries, and what a client gets of a receipt."""

from dataclasses import dataclass, field
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.log import Inclusion, LogEntry
from proofserve.protocol.receipts.record import Receipt

PUBLIC_KEY_BYTES = DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class SigningKey:
    """The key with which a node signs its receipts and its log."""

    _key: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, pem: bytes) -> Self:
        """Raises ProtocolError for other bytes than an Ed25519 key in PEM without a password."""
        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:
            raise ProtocolError("key", "is not a private key in PEM without a password") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ProtocolError("key", "is not an Ed25519 key")
        return cls(key)

    def to_pem(self) -> bytes:
        """PKCS 8, without a password."""
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def public_key(self) -> bytes:
        """32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, digest: bytes) -> bytes:
        """64 bytes. Raises ProtocolError for a digest that is not 32 bytes."""
        _require_digest(digest)
        return self._key.sign(digest)


def is_signed(digest: bytes, signature: bytes, public_key: bytes) -> bool:
    """Whether ``signature`` is that of ``public_key`` over the 32 bytes of ``digest``.

    Bytes of a wrong length are no key and no signature. Raises ProtocolError for a digest that is
    not 32 bytes.
    """
    _require_digest(digest)
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, digest)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class SignedEntry:
    """An entry of the log; ``signature`` is over its hash."""

    entry: LogEntry
    signature: bytes


@dataclass(frozen=True, slots=True)
class SignedReceipt:
    """What a node answers about one choice of a response.

    ``signature`` is over the receipt's digest. ``inclusion`` is None until the receipt is in the
    log; then ``entry_signature`` is over the hash of the entry that ``inclusion`` has. Both
    signatures are of ``public_key``. Nothing is verified by making this record.
    """

    receipt: Receipt
    public_key: bytes
    signature: bytes
    inclusion: Inclusion | None = None
    entry_signature: bytes | None = None


def require_signatures(signed: SignedReceipt) -> None:
    """Raise ProtocolError, naming the field, unless all signatures are of the stated key.

    The caller decides whether that key is the node's.
    """
    if not is_signed(signed.receipt.digest, signed.signature, signed.public_key):
        raise ProtocolError("signature", "is not of this receipt and this public key")
    if signed.inclusion is None:
        return
    found = signed.inclusion.entry.hash
    if not is_signed(found, signed.entry_signature or b"", signed.public_key):
        raise ProtocolError(
            "inclusion.entry_signature", "is not of this entry of the log and this public key"
        )


def _require_digest(digest: bytes) -> None:
    if len(digest) != DIGEST_BYTES:
        raise ProtocolError("digest", f"{len(digest)} bytes where {DIGEST_BYTES} are needed")
