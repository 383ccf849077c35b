import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from proofserve.protocol.codec import decode, encode
from proofserve.protocol.errors import MalformedVector

WIRE = arrays(
    np.float16,
    st.tuples(st.integers(0, 4), st.integers(1, 20)),
    elements=st.floats(width=16, allow_nan=False, allow_infinity=False),
)


@given(WIRE)
def test_float16_values_round_trip_bit_for_bit(vectors: np.ndarray) -> None:
    texts = encode(vectors.astype(np.float32))
    assert len(texts) == len(vectors)
    for text, vector in zip(texts, vectors, strict=True):
        back = decode(text, len(vector))
        assert back.dtype == np.float32
        assert back.astype(np.float16).tobytes() == vector.tobytes()


def test_the_usual_vector_has_32_characters() -> None:
    assert [len(text) for text in encode(np.ones((2, 12), dtype=np.float32))] == [32, 32]


def test_rounding_is_to_nearest_even_and_overflow_is_silent() -> None:
    values = np.array([[1.00048828125, 65519.0, 65520.0]], dtype=np.float32)
    raw = base64.b64decode(encode(values)[0])
    assert np.frombuffer(raw, dtype="<f2").tolist() == [1.0, 65504.0, np.inf]


@pytest.mark.parametrize(
    ("text", "k_dim", "complaint"),
    [
        ("", 1, "0 bytes where 2"),
        ("ADw=", 2, "2 bytes where 4"),
        ("ADwAPA==", 1, "4 bytes where 2"),
        ("YWJj", 2, "3 bytes where 4"),
        ("AD w=", 1, "alphabet"),
        ("ADw=\n", 1, "alphabet"),
        (" ADw=", 1, "alphabet"),
        ("-_8=", 1, "alphabet"),
        ("\uff21Dw=", 1, "alphabet"),
        ("A=w=", 1, "alphabet"),
        ("ADw===", 1, "alphabet"),
        ("ADw", 1, "padded"),
        ("A", 1, "padded"),
        ("==", 1, "base64"),
        ("ADw==", 1, "base64"),
        ("ADx=", 1, "canonical"),
        ("AHw=", 1, "finite"),
        ("AH4=", 1, "finite"),
    ],
)
def test_every_flaw_is_told(text: str, k_dim: int, complaint: str) -> None:
    with pytest.raises(MalformedVector, match=complaint) as caught:
        decode(text, k_dim)
    assert caught.value.field == "vector_b64"


@given(st.text(max_size=12), st.integers(1, 4))
def test_whatever_decodes_is_the_one_text_of_its_vector(text: str, k_dim: int) -> None:
    try:
        vector = decode(text, k_dim)
    except MalformedVector:
        return
    assert encode(vector[None]) == [text]
