import base64
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import (
    Receipt,
    Sampling,
    SignedReceipt,
    SigningKey,
    inclusions,
    is_signed,
    next_entry,
    require_signatures,
    token_hash,
)

# RFC 8032, section 7.1, TEST 1: the secret key; its public key is below.
SECRET = "302e020100300506032b657004220420" + (
    "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"
)
PUBLIC = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
DIGEST = bytes(range(32))
KEY = SigningKey.new()
NOW = 1_800_000_000_000
RECEIPT = Receipt(
    response_id="chatcmpl-1",
    choice=0,
    model="trained",
    adapter=None,
    weights_digest="70" * 32,
    sampling=Sampling(),
    prompt_tokens=0,
    prompt_sha256=token_hash([]),
    output_tokens=0,
    output_sha256=token_hash([]),
    sketch_key="day 1",
    k_dim=16,
    sketches=b"",
    finish_reason="abort",
    versions=(),
    created_ms=NOW,
)
ENTRY = next_entry(None, [RECEIPT.digest], NOW)
SIGNED = SignedReceipt(
    receipt=RECEIPT,
    public_key=KEY.public_key,
    signature=KEY.sign(RECEIPT.digest),
    inclusion=inclusions(ENTRY, [RECEIPT.digest])[0],
    entry_signature=KEY.sign(ENTRY.hash),
)


def pem_of(der: str) -> bytes:
    text = base64.b64encode(bytes.fromhex(der)).decode()
    return f"-----BEGIN PRIVATE KEY-----\n{text}\n-----END PRIVATE KEY-----\n".encode()


def test_the_public_key_is_that_of_the_standard() -> None:
    assert SigningKey.from_pem(pem_of(SECRET)).public_key.hex() == PUBLIC


def test_a_key_survives_its_file() -> None:
    read = SigningKey.from_pem(KEY.to_pem())
    assert read.public_key == KEY.public_key
    assert read.sign(DIGEST) == KEY.sign(DIGEST)
    assert is_signed(DIGEST, read.sign(DIGEST), KEY.public_key)


def test_keys_differ_and_do_not_show_themselves() -> None:
    assert SigningKey.new().public_key != KEY.public_key
    assert "Ed25519" not in repr(KEY)


def test_other_bytes_are_no_key() -> None:
    other = generate_private_key(SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    locked = load_pem_private_key(KEY.to_pem(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    with pytest.raises(ProtocolError, match="is not an Ed25519 key"):
        SigningKey.from_pem(other)
    for pem in (b"", b"key", KEY.to_pem()[:60], locked):
        with pytest.raises(ProtocolError, match="is not a private key in PEM"):
            SigningKey.from_pem(pem)


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_only_digests_are_signed(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"digest: {size} bytes"):
        KEY.sign(bytes(size))
    with pytest.raises(ProtocolError, match=f"digest: {size} bytes"):
        is_signed(bytes(size), bytes(64), KEY.public_key)


def test_every_changed_byte_is_found() -> None:
    signature = KEY.sign(DIGEST)
    for n in range(64):
        changed = bytearray(signature)
        changed[n] ^= 1
        assert not is_signed(DIGEST, bytes(changed), KEY.public_key)
    for n in range(32):
        digest = bytearray(DIGEST)
        digest[n] ^= 1
        assert not is_signed(bytes(digest), signature, KEY.public_key)


def test_another_key_and_other_sizes_are_not_the_signature() -> None:
    signature = KEY.sign(DIGEST)
    assert not is_signed(DIGEST, signature, SigningKey.new().public_key)
    assert not is_signed(DIGEST, signature[:-1], KEY.public_key)
    assert not is_signed(DIGEST, b"", KEY.public_key)
    assert not is_signed(DIGEST, signature, KEY.public_key[:-1])
    assert not is_signed(DIGEST, signature, b"")


def test_a_signed_receipt_needs_both_signatures() -> None:
    require_signatures(SIGNED)
    require_signatures(replace(SIGNED, inclusion=None, entry_signature=None))
    other = SigningKey.new()
    for changed in (
        replace(SIGNED, public_key=other.public_key),
        replace(SIGNED, signature=other.sign(RECEIPT.digest)),
        replace(SIGNED, receipt=replace(RECEIPT, choice=1)),
    ):
        with pytest.raises(ProtocolError, match=r"^signature: "):
            require_signatures(changed)
    for signature in (None, other.sign(ENTRY.hash), KEY.sign(RECEIPT.digest)):
        with pytest.raises(ProtocolError, match=r"^inclusion\.entry_signature: "):
            require_signatures(replace(SIGNED, entry_signature=signature))
