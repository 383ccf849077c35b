import hashlib

from hypothesis import given
from hypothesis import strategies as st

from proofserve.protocol.seeds import seed, words


@given(st.text(st.characters(codec="utf-8")))
def test_words_are_the_whole_digest_and_the_seed_is_its_start(string: str) -> None:
    digest = hashlib.sha256(string.encode()).hexdigest()
    assert "".join(f"{word:08x}" for word in words(string)) == digest
    assert f"{seed(string):08x}" == digest[:8]
