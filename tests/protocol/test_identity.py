import hashlib

from hypothesis import given
from hypothesis import strategies as st

from proofserve.protocol.identity import (
    Challenge,
    layer_string,
    projection_string,
    seed,
    target_string,
    words,
)


def test_strings_of_a_block() -> None:
    assert projection_string("0xab") == "0xab_lm_head"
    assert target_string("0xab") == "0xab_target"
    assert layer_string("0xab", 3) == "0xab_layer_3_householder"


def test_strings_of_a_nonce() -> None:
    challenge = Challenge("0xab", "key")
    assert challenge.input_string(7) == "0xab_key_nonce7"
    assert challenge.sign_string(7) == "0xab_key_nonce_7_signs"
    assert challenge.reflection_string(7, 2) == "0xab_key_nonce_7_hidden_r2"
    assert challenge.pick_string(7, 12) == "0xab_key_nonce_7_pick_12"
    assert challenge.rotation_string(7, 12, 10) == "0xab_key_nonce_7_haar_hh_12_10"


def test_a_dummy_nonce_keeps_its_sign() -> None:
    assert Challenge("0xab", "key").input_string(-1) == "0xab_key_nonce-1"


@given(st.text(st.characters(codec="utf-8")))
def test_words_are_the_whole_digest_and_the_seed_is_its_start(string: str) -> None:
    digest = hashlib.sha256(string.encode()).hexdigest()
    assert "".join(f"{word:08x}" for word in words(string)) == digest
    assert f"{seed(string):08x}" == digest[:8]
