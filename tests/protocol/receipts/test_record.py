import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from proofserve.protocol.codec import to_float16
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import Receipt, Sampling, token_hash

VECTORS = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
RECEIPT = Receipt(
    response_id="chatcmpl-1",
    choice=0,
    model="trained",
    adapter=None,
    weights_digest="70" * 32,
    sampling=Sampling(temperature=0.7),
    prompt_tokens=5,
    prompt_sha256=token_hash([1, 2, 3, 4, 5]),
    output_tokens=3,
    output_sha256=token_hash([6, 7, 8]),
    sketch_key="day 1",
    k_dim=16,
    sketches=to_float16(VECTORS).tobytes(),
    finish_reason="stop",
    versions=(("vllm", "0.32.0"),),
    created_ms=1_800_000_000_000,
)


def test_the_digest_is_of_canonical_json() -> None:
    text = json.dumps(RECEIPT.to_wire(), sort_keys=True, separators=(",", ":"))
    expected = hashlib.sha256(b"proofserve receipt-v1\0" + text.encode()).digest()
    assert RECEIPT.digest == expected
    assert json.loads(text)["scheme"] == "receipt-v1"


@pytest.mark.parametrize(
    "change",
    [
        {"response_id": "chatcmpl-2"},
        {"output_sha256": token_hash([6, 7, 9])},
        {"sampling": Sampling(temperature=0.8)},
        {"sketches": to_float16(VECTORS + np.float32(0.01)).tobytes()},
        {"adapter": "lora"},
        {"created_ms": 1},
    ],
)
def test_every_field_is_signed(change: dict[str, object]) -> None:
    assert replace(RECEIPT, **change).digest != RECEIPT.digest  # type: ignore[arg-type]


def test_sketches_come_back_as_float16_has_them() -> None:
    assert np.array_equal(RECEIPT.vectors, VECTORS.astype(np.float16).astype(np.float32))


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ProtocolError, match="sketches: 96 bytes where 128 are needed"):
        replace(RECEIPT, output_tokens=4)


def test_a_token_hash_is_of_little_endian_words() -> None:
    assert token_hash([1]) == hashlib.sha256(b"\1\0\0\0").hexdigest()
    assert token_hash([]) == hashlib.sha256(b"").hexdigest()
