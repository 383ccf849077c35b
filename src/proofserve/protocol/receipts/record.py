"""What a node signs about chat answers: receipts, the public log of them, and its signatures.

Only the log proves when a receipt was made: a validator that has seen an entry cannot be shown
another one in its place, because every entry names the hash of the one before.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from numpy.typing import NDArray

from proofserve.protocol.commitments import opens, paths, root
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.shake import u64

SCHEME: Final = "receipt-v1"
# Begins what is hashed: other schemes of ours never hash the same bytes.
VERSION = b"proofserve receipt-v1\0"
# Limits of ``k_dim``.
LEAST, MOST = 16, 64


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of an answer were drawn; the defaults change nothing.

    A ``temperature`` of 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep every token. ``restricted``
    says that the request changed or excluded tokens otherwise (a grammar, a bias of logits, words
    that are not allowed, a least length); then the tokens cannot be tested.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    restricted: bool = False


@dataclass(frozen=True, slots=True)
class Receipt:
    """``sketches`` are float16 LE, [output_tokens, k_dim], one row for each token of the answer.

    ``choice`` is the index among a request's answers, ``adapter`` the name of a LoRA adapter.
    Hashes and the digest are in hexadecimal; ``created_ms`` is Unix time in milliseconds, when the
    answer ended. Raises ProtocolError, naming the field, if the sizes do not fit each other.
    """

    response_id: str
    choice: int
    model: str
    adapter: str | None
    weights_digest: str
    sampling: Sampling
    prompt_tokens: int
    prompt_sha256: str
    output_tokens: int
    output_sha256: str
    sketch_key: str
    k_dim: int
    sketches: bytes
    finish_reason: str
    versions: tuple[tuple[str, str], ...]
    created_ms: int

    def __post_init__(self) -> None:
        needed = 2 * self.output_tokens * self.k_dim
        if len(self.sketches) != needed:
            raise ProtocolError("sketches", f"{len(self.sketches)} bytes where {needed} are needed")

    @property
    def vectors(self) -> NDArray[np.float32]:
        """float32 [output_tokens, k_dim]; not finite where the node's state was not."""
        flat = np.frombuffer(self.sketches, "<f2").astype(np.float32)
        return flat.reshape(self.output_tokens, self.k_dim)

    def to_wire(self) -> dict[str, Any]:
        """The fields as JSON has them, with ``scheme``."""
        fields = asdict(self)
        fields["sketches"] = base64.b64encode(self.sketches).decode("ascii")
        fields["versions"] = dict(self.versions)
        return {"scheme": SCHEME, **fields}

    @property
    def digest(self) -> bytes:
        """SHA-256 of version and ``to_wire`` as ASCII JSON, keys in order, no spaces: 32 bytes."""
        text = json.dumps(self.to_wire(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(VERSION + text.encode("ascii")).digest()


def token_hash(ids: Sequence[int]) -> str:
    """SHA-256 over the token ids as u32 LE, in hexadecimal."""
    return hashlib.sha256(np.array(ids, dtype="<u4").tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """``sketches`` are the bytes of a receipt, or None if the engine lost rows of them.

    ``response_id`` is the id that the client got, ``choice`` the index among the request's answers,
    ``adapter`` the name of a LoRA adapter. ``output_ids`` are the tokens that the client got, stop
    tokens included; an answer whose client went away has those that the engine made until then, and
    "abort" as its ``finish_reason``. ``created_ms`` is Unix time in milliseconds, at its end.
    """

    response_id: str
    choice: int
    adapter: str | None
    sampling: Sampling
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sketch_key: str
    k_dim: int
    sketches: bytes | None
    finish_reason: str
    created_ms: int


_ENTRY = b"\x02"
FIRST_PREVIOUS = bytes(32)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """``count`` receipts under ``root``; ``previous`` is the hash of the entry before.

    ``index`` counts entries from 0, ``time_ms`` is Unix time in milliseconds.
    """

    index: int
    time_ms: int
    count: int
    root: bytes
    previous: bytes

    @property
    def hash(self) -> bytes:
        """SHA-256(0x02 + previous + index, time_ms and count as u64 LE + root): 32 bytes."""
        numbers = u64(self.index) + u64(self.time_ms) + u64(self.count)
        return hashlib.sha256(_ENTRY + self.previous + numbers + self.root).digest()


@dataclass(frozen=True, slots=True)
class Inclusion:
    """The place of a receipt under an entry's root, and the hashes beside its way there."""

    entry: LogEntry
    index: int
    path: tuple[bytes, ...]


def next_entry(before: LogEntry | None, digests: Sequence[bytes], time_ms: int) -> LogEntry:
    """An entry over the ``digests`` of one receipt or more; ``before`` is None for the first."""
    index, previous = (0, FIRST_PREVIOUS) if before is None else (before.index + 1, before.hash)
    return LogEntry(index, time_ms, len(digests), root(digests), previous)


def inclusions(entry: LogEntry, digests: Sequence[bytes]) -> list[Inclusion]:
    """One for each of the ``digests`` of ``entry``, in their order."""
    found = paths(digests, range(len(digests)))
    return [Inclusion(entry, index, path) for index, path in enumerate(found)]


def require_inclusion(digest: bytes, found: Inclusion) -> None:
    """Raise ProtocolError, naming what is wrong, unless the receipt is in the log's entry."""
    entry = found.entry
    if not opens(entry.root, entry.count, found.index, digest, found.path):
        raise ProtocolError("path", "it does not lead to the root of the log's entry")


def require_chain(entries: Sequence[LogEntry]) -> None:
    """Raise ProtocolError, naming the entry, unless ``entries`` follow each other.

    The first may be any entry of a log; the first of the log itself has no previous one.
    """
    for before, entry in pairwise(entries):
        if entry.index != before.index + 1 or entry.previous != before.hash:
            raise ProtocolError("previous", f"entry {entry.index} does not follow {before.index}")
        if entry.time_ms < before.time_ms:
            raise ProtocolError("time_ms", f"entry {entry.index} is older than the one before")
    if entries and entries[0].index == 0 and entries[0].previous != FIRST_PREVIOUS:
        raise ProtocolError("previous", "the first entry of a log has none")


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
