"""The wire form of a vector: float16, little-endian, strict base64 (protocol B.1.9, P.2.1)."""

import base64
import binascii
import re

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.errors import MalformedVector

_WIRE_DTYPE = np.dtype("<f2")
_ALPHABET = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_FIELD = "vector_b64"


def to_float16(vectors: NDArray[np.float32]) -> NDArray[np.float16]:
    """Round to the nearest even float16; magnitudes from 65520 on become infinite."""
    with np.errstate(over="ignore"):
        return vectors.astype(_WIRE_DTYPE)


def encode(vectors: NDArray[np.float32]) -> list[str]:
    """One text per row of ``vectors`` [b, k]; a value that is not finite is encoded as it is."""
    return [base64.b64encode(row.tobytes()).decode("ascii") for row in to_float16(vectors)]


def decode(text: str, k_dim: int) -> NDArray[np.float32]:
    """The vector float32 [k_dim] that ``text`` encodes.

    Raises MalformedVector, saying what is wrong, for anything but the one canonical text of
    ``k_dim`` finite values: no whitespace, no missing padding, no stray bits.
    """
    if not _ALPHABET.fullmatch(text):
        raise MalformedVector(_FIELD, "characters outside the base64 alphabet")
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise MalformedVector(_FIELD, f"not padded base64 ({error})") from None
    if base64.b64encode(raw).decode("ascii") != text:
        raise MalformedVector(_FIELD, "not canonical base64: unused bits or padding differ")
    if len(raw) != k_dim * _WIRE_DTYPE.itemsize:
        expected = k_dim * _WIRE_DTYPE.itemsize
        raise MalformedVector(_FIELD, f"{len(raw)} bytes where {expected} are needed")
    vector = np.frombuffer(raw, dtype=_WIRE_DTYPE).astype(np.float32)
    if not np.isfinite(vector).all():
        raise MalformedVector(_FIELD, "not every value is finite")
    return vector
