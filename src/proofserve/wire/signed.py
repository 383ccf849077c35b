"""What nodes sign: receipts and their log as strict JSON, and answers to requests.

Hashes, keys and signatures of receipts are in hexadecimal. A signed answer says what a node said to
one request: by it a third party can hold the node to that.
"""

import base64
import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import (
    LEAST,
    MOST,
    SCHEME,
    Inclusion,
    LogEntry,
    Receipt,
    Sampling,
    SignedEntry,
    SignedReceipt,
    SigningKey,
    is_signed,
)
from proofserve.wire.records import UnicodeText, Whole, base64_bytes, first_problem

_HEX = re.compile("(?:[0-9a-f]{2})*")
_Model = TypeVar("_Model", bound=BaseModel)


def _bytes(text: object, size: int) -> bytes:
    if not isinstance(text, str) or not _HEX.fullmatch(text):
        raise PydanticCustomError("hex", "is not lower-case hexadecimal")
    raw = bytes.fromhex(text)
    if len(raw) != size:
        raise PydanticCustomError(
            "hex", "{n} bytes where {size} are needed", {"n": len(raw), "size": size}
        )
    return raw


def _base64(text: object) -> bytes:
    raw = base64_bytes(text)
    # Other texts may decode to the same bytes; only one is the node's.
    if base64.b64encode(raw).decode("ascii") != text:
        raise PydanticCustomError("base64", "is not base64")
    return raw


def _hex_of(size: int) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"^[0-9a-f]{{{2 * size}}}$"})


_Hash = Annotated[bytes, BeforeValidator(partial(_bytes, size=32)), _hex_of(32)]
_Signature = Annotated[bytes, BeforeValidator(partial(_bytes, size=64)), _hex_of(64)]
# A receipt has these hashes as text.
_Digest = Annotated[str, BeforeValidator(lambda text: _bytes(text, 32).hex()), _hex_of(32)]
_BASE64 = WithJsonSchema({"type": "string", "contentEncoding": "base64"})
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class SamplingRecord(BaseModel, strict=True, extra="forbid"):
    """The sampling parameters of an answer; JSON's 1 and 1.0 are the same number."""

    temperature: Annotated[_Finite, Field(ge=0)]
    top_p: Annotated[_Finite, Field(gt=0, le=1)]
    top_k: Whole
    min_p: Annotated[_Finite, Field(ge=0, le=1)]
    presence_penalty: _Finite
    frequency_penalty: _Finite
    repetition_penalty: Annotated[_Finite, Field(gt=0)]
    restricted: bool


class ReceiptRecord(BaseModel, strict=True, extra="forbid"):
    """The fields of a receipt: what the signature is over."""

    scheme: Literal["receipt-v1"]
    response_id: Annotated[UnicodeText, Field(min_length=1)]
    choice: Whole
    model: UnicodeText
    adapter: UnicodeText | None
    weights_digest: _Digest
    sampling: SamplingRecord
    prompt_tokens: Whole
    prompt_sha256: _Digest
    output_tokens: Whole
    output_sha256: _Digest
    sketch_key: UnicodeText
    k_dim: int = Field(ge=LEAST, le=MOST)
    sketches: Annotated[bytes, BeforeValidator(_base64), _BASE64]
    finish_reason: UnicodeText
    versions: dict[UnicodeText, UnicodeText]
    created_ms: Whole

    def to_receipt(self) -> Receipt:
        """Raises ProtocolError for sizes that do not fit each other."""
        fields = self.model_dump(exclude={"scheme"})
        fields["sampling"] = Sampling(**fields["sampling"])
        fields["versions"] = tuple(sorted(self.versions.items()))
        try:
            return Receipt(**fields)
        except ProtocolError as error:
            raise ProtocolError(f"receipt.{error.field}", error.message) from error


class EntryRecord(BaseModel, strict=True, extra="forbid"):
    """One entry of the log: ``count`` receipts under ``root``."""

    index: Whole
    time_ms: Whole
    count: Annotated[Whole, Field(ge=1)]
    root: _Hash
    previous: _Hash

    def to_entry(self) -> LogEntry:
        return LogEntry(**self.model_dump())


class SignedEntryRecord(BaseModel, strict=True):
    """An entry, and the signature of its hash. Fields that newer nodes add are ignored."""

    entry: EntryRecord
    entry_signature: _Signature

    def to_signed_entry(self) -> SignedEntry:
        return SignedEntry(self.entry.to_entry(), self.entry_signature)


class LoggedEntries(BaseModel, strict=True):
    """The body of ``/logged``: new entries of a node's log. Fields of newer nodes are ignored."""

    public_key: _Hash
    # A node sends at most a tenth.
    entries: list[SignedEntryRecord] = Field(min_length=1, max_length=10_000)


class InclusionRecord(SignedEntryRecord):
    """The place of a receipt in an entry, and the hashes beside its way to the root."""

    index: Whole
    # One hash for each doubling of the entry's receipts: more than 63 cannot occur.
    path: list[_Hash] = Field(max_length=63)


class SignedReceiptRecord(BaseModel, strict=True):
    """A receipt, its signature, and its place in the log once it has one."""

    receipt: ReceiptRecord
    public_key: _Hash
    signature: _Signature
    inclusion: InclusionRecord | None


def signed_receipt(body: object) -> SignedReceipt:
    """The record of a JSON object, not verified. Raises ProtocolError with the wrong field."""
    parsed = _parsed(SignedReceiptRecord, body)
    found = parsed.inclusion
    signed = parsed.receipt.to_receipt(), parsed.public_key, parsed.signature
    if found is None:
        return SignedReceipt(*signed)
    place = Inclusion(found.entry.to_entry(), found.index, tuple(found.path))
    return SignedReceipt(*signed, place, found.entry_signature)


def receipt_of(body: object) -> Receipt:
    """The receipt that ``Receipt.to_wire`` wrote as JSON. Raises as ``signed_receipt``."""
    return _parsed(ReceiptRecord, body).to_receipt()


def signed_entry(body: object) -> SignedEntry:
    """The entry of a JSON object. Raises as ``signed_receipt``; the signature is not checked."""
    return _parsed(SignedEntryRecord, body).to_signed_entry()


def signed_receipt_body(signed: SignedReceipt) -> dict[str, Any]:
    found = signed.inclusion
    inclusion = None
    if found is not None and signed.entry_signature is not None:
        inclusion = {
            **signed_entry_body(SignedEntry(found.entry, signed.entry_signature)),
            "index": found.index,
            "path": [each.hex() for each in found.path],
        }
    return {
        "receipt": signed.receipt.to_wire(),
        "public_key": signed.public_key.hex(),
        "signature": signed.signature.hex(),
        "inclusion": inclusion,
    }


def signed_entry_body(signed: SignedEntry) -> dict[str, Any]:
    entry = signed.entry
    hashes = {"root": entry.root.hex(), "previous": entry.previous.hex()}
    return {"entry": asdict(entry) | hashes, "entry_signature": signed.signature.hex()}


def _parsed(model: type[_Model], body: object) -> _Model:
    """Raises ProtocolError for the first field that is wrong."""
    if isinstance(body, Mapping) and isinstance(body.get("receipt"), Mapping):
        scheme = body["receipt"].get("scheme")
        if isinstance(scheme, str) and scheme != SCHEME:
            raise ProtocolError("receipt.scheme", f"this proofserve reads {SCHEME} only")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise ProtocolError(*first_problem(error)) from error


# -- answers ---------------------------------------------------------------------------------------

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
        made = hashlib.sha256(_DOMAIN)
        asked = (self.method.encode(), self.target.encode(), self.request)
        for field in (*asked, self.body, self.time_ms.to_bytes(8, "little")):
            made.update(len(field).to_bytes(4, "little"))
            made.update(field)
        return made.digest()

    @property
    def is_signed(self) -> bool:
        return is_signed(self.digest, self.signature, self.public_key)


def answer_header(key: SigningKey, method: str, target: str, request: bytes, body: bytes) -> str:
    """The value of ``ANSWER_HEADER`` for an answer of now."""
    time_ms = int(time.time() * 1000)
    answer = SignedAnswer(method, target, request, body, time_ms, key.public_key, b"")
    signature = base64.b64encode(key.sign(answer.digest)).decode("ascii")
    return f"t={time_ms}, key={key.public_key.hex()}, signature={signature}"


def answer_with(header: str, method: str, target: str, request: bytes, body: bytes) -> SignedAnswer:
    """The answer that came with ``header``. Raises ProtocolError for one in another form."""
    if (found := _FORM.fullmatch(header)) is None:
        raise ProtocolError("signature", f"{ANSWER_HEADER} is not t=, key=, signature=")
    key, signature = bytes.fromhex(found[2]), base64.b64decode(found[3], validate=True)
    return SignedAnswer(method, target, request, body, int(found[1]), key, signature)
