"""Receipts and entries of the log as JSON: strict in every field."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import (
    Receipt,
    Sampling,
    SignedEntry,
    SignedReceipt,
    SigningKey,
    inclusions,
    next_entry,
    require_inclusion,
    require_signatures,
    token_hash,
)
from proofserve.wire.signed import (
    signed_entry,
    signed_entry_body,
    signed_receipt,
    signed_receipt_body,
)

NOW = 1_800_000_000_000
KEY = SigningKey.new()
RECEIPT = Receipt(
    response_id="chatcmpl-1",
    choice=0,
    model="trained",
    adapter=None,
    weights_digest="70" * 32,
    sampling=Sampling(temperature=0.7, top_p=0.9),
    prompt_tokens=5,
    prompt_sha256=token_hash([1, 2, 3, 4, 5]),
    output_tokens=3,
    output_sha256=token_hash([6, 7, 8]),
    sketch_key="2027-01-15-00",
    k_dim=16,
    sketches=bytes(range(96)),
    finish_reason="stop",
    versions=(("proofserve", "1"), ("vllm", "0.32.0")),
    created_ms=NOW,
)
DIGESTS = [RECEIPT.digest, bytes(32), bytes([1]) * 32]
ENTRY = next_entry(None, DIGESTS, NOW + 700)
SIGNED = SignedReceipt(
    receipt=RECEIPT,
    public_key=KEY.public_key,
    signature=KEY.sign(RECEIPT.digest),
    inclusion=inclusions(ENTRY, DIGESTS)[0],
    entry_signature=KEY.sign(ENTRY.hash),
)


def body() -> Any:
    return json.loads(json.dumps(signed_receipt_body(SIGNED)))


def changed(path: str, value: object) -> Any:
    made = body()
    *outer, last = path.split(".")
    target = made
    for name in outer:
        target = target[name]
    target[last] = value
    return made


def test_a_receipt_survives_the_way_through_json() -> None:
    read = signed_receipt(body())
    assert read == SIGNED
    require_signatures(read)
    assert read.inclusion is not None
    require_inclusion(read.receipt.digest, read.inclusion)


def test_a_receipt_outside_the_log_has_no_inclusion() -> None:
    waiting = replace(SIGNED, inclusion=None, entry_signature=None)
    made = signed_receipt_body(waiting)
    assert made["inclusion"] is None
    assert signed_receipt(made) == waiting
    require_signatures(signed_receipt(made))


def test_whole_numbers_are_the_numbers_that_were_signed() -> None:
    """A JSON library may write 1.0 as 1."""
    receipt = replace(RECEIPT, sampling=Sampling(temperature=1.0))
    made = signed_receipt_body(replace(SIGNED, receipt=receipt))
    made["receipt"]["sampling"] |= {"temperature": 1, "top_p": 1, "min_p": 0}
    assert signed_receipt(made).receipt.digest == receipt.digest


BAD: dict[str, list[object]] = {
    "receipt": [None, [], "x"],
    "receipt.scheme": ["receipt-v2", None, 1],
    "receipt.response_id": ["", 7, None, "\ud800"],
    "receipt.choice": [-1, 0.5, "0", True, 2**70],
    "receipt.model": [None, 1],
    "receipt.adapter": [1, []],
    "receipt.weights_digest": ["", "70" * 31, "zz" * 32, "7A" * 32, None, 5],
    "receipt.sampling": [None, "greedy"],
    "receipt.sampling.temperature": [-0.1, float("nan"), float("inf"), "1", None],
    "receipt.sampling.top_p": [0, 1.5, "1"],
    "receipt.sampling.top_k": [-1, 2.5],
    "receipt.sampling.min_p": [-0.1, 2],
    "receipt.sampling.presence_penalty": [float("nan"), None],
    "receipt.sampling.frequency_penalty": [float("inf"), "0"],
    "receipt.sampling.repetition_penalty": [0, -1, None],
    "receipt.sampling.restricted": [0, "false", None],
    "receipt.prompt_tokens": [-1, "5", None],
    "receipt.prompt_sha256": ["00", None],
    "receipt.output_tokens": [-1, 3.5],
    "receipt.output_sha256": ["g" * 64, 0],
    "receipt.sketch_key": [None, 1],
    "receipt.k_dim": [15, 65, "16", 16.5],
    "receipt.sketches": ["!", "AA", "AB==", None, "AAAA AAAA"],
    "receipt.finish_reason": [None, 1],
    "receipt.versions": [None, [], {"vllm": 1}],
    "receipt.created_ms": [-1, "now", 1.5],
    "public_key": [None, "", "ab" * 31, "AB" * 32],
    "signature": [None, "", "ab" * 32, "ab" * 65],
    "inclusion": [[], "x"],
    "inclusion.entry": [None, {}],
    "inclusion.entry.index": [-1, "0"],
    "inclusion.entry.time_ms": [-1, None],
    "inclusion.entry.count": [0, -1],
    "inclusion.entry.root": ["00", None],
    "inclusion.entry.previous": [None, "00" * 33],
    "inclusion.entry_signature": [None, "00"],
    "inclusion.index": [-1, True],
    "inclusion.path": [None, "00", ["00"], ["00" * 32] * 64],
}


@pytest.mark.parametrize(("path", "value"), [(p, v) for p, values in BAD.items() for v in values])
def test_a_bad_field_is_refused_by_its_name(path: str, value: object) -> None:
    with pytest.raises(ProtocolError) as refused:
        signed_receipt(changed(path, value))
    assert refused.value.field.startswith(path)


@pytest.mark.parametrize("path", list(BAD))
def test_a_missing_field_is_refused_by_its_name(path: str) -> None:
    made = body()
    *outer, last = path.split(".")
    target = made
    for name in outer:
        target = target[name]
    del target[last]
    with pytest.raises(ProtocolError) as refused:
        signed_receipt(made)
    assert refused.value.field == path


@pytest.mark.parametrize("where", ["receipt", "receipt.sampling", "inclusion.entry"])
def test_an_unknown_field_is_refused_where_it_would_seem_to_be_signed(where: str) -> None:
    with pytest.raises(ProtocolError, match=rf"^{where}.extra: "):
        signed_receipt(changed(f"{where}.extra", 1))


def test_sketches_of_another_size_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"^receipt.sketches: 96 bytes where 64 are needed"):
        signed_receipt(changed("receipt.output_tokens", 2))


@pytest.mark.parametrize("text", [None, [], 3, "receipt"])
def test_what_is_not_an_object_is_refused(text: object) -> None:
    for parse in (signed_receipt, signed_entry):
        with pytest.raises(ProtocolError, match=r"^body: "):
            parse(text)


def test_an_entry_survives_the_way_through_json() -> None:
    signed = SignedEntry(ENTRY, KEY.sign(ENTRY.hash))
    assert signed_entry(json.loads(json.dumps(signed_entry_body(signed)))) == signed


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("entry.count", lambda _: 0),
        ("entry.root", lambda text: text.upper()),
        ("entry_signature", lambda text: text[2:]),
    ],
)
def test_a_bad_field_of_an_entry_is_refused(path: str, change: Callable[[Any], Any]) -> None:
    made: Any = signed_entry_body(SignedEntry(ENTRY, b"\xab" * 64))
    made["entry"]["root"] = "ab" * 32
    *outer, last = path.split(".")
    target = made["entry"] if outer else made
    target[last] = change(target[last])
    with pytest.raises(ProtocolError) as refused:
        signed_entry(made)
    assert refused.value.field == path
