"""Many vectors in base64 at a time, with the rules of ``protocol.codec`` for one (B.1.9, P.2.1)."""

import base64
import binascii
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.codec import decode
from proofserve.protocol.errors import MalformedVector

_WIRE_DTYPE = np.dtype("<f2")
_PAD = ord("=")


def decode_all(texts: Sequence[str], width: int) -> NDArray[np.float16]:
    """The vectors float16 [n, width] of ``texts``, little-endian.

    Raises MalformedVector for the first text that ``codec.decode`` refuses; the field is its place.
    """
    vectors = _decoded(texts, width)
    if vectors is None:
        # Something is wrong with one of them: the slow reader says what.
        for place, text in enumerate(texts):
            try:
                decode(text, width)
            except MalformedVector as error:
                raise MalformedVector(f"{place}.{error.field}", error.message) from error
        raise AssertionError("each vector is accepted, and all of them together are not")
    return vectors


def encode_all(vectors: NDArray[np.float16]) -> list[str]:
    """One text for each row of ``vectors``, little-endian float16 [n, width]."""
    size = vectors.shape[1] * _WIRE_DTYPE.itemsize
    pads = -size % 3
    length = (size + pads) // 3 * 4
    raw = np.ascontiguousarray(vectors).view(np.uint8).reshape(len(vectors), size)
    text = base64.b64encode(np.pad(raw, ((0, 0), (0, pads))).tobytes())
    if pads:
        chars = np.frombuffer(text, np.uint8).reshape(-1, length).copy()
        chars[:, -pads:] = _PAD
        text = chars.tobytes()
    joined = text.decode("ascii")
    return [joined[start : start + length] for start in range(0, len(joined), length)]


def _decoded(texts: Sequence[str], width: int) -> NDArray[np.float16] | None:
    """All vectors, or None if any text is malformed."""
    size = width * _WIRE_DTYPE.itemsize
    pads = -size % 3
    length = (size + pads) // 3 * 4
    if any(len(text) != length for text in texts):
        return None
    try:
        joined = "".join(texts).encode("ascii")
        if pads:
            chars = np.frombuffer(joined, np.uint8).reshape(-1, length).copy()
            if (chars[:, -pads:] != _PAD).any():
                return None
            # As zeros: the bytes that they lead to are zero unless unused bits are set.
            chars[:, -pads:] = ord("A")
            joined = chars.tobytes()
        raw = np.frombuffer(binascii.a2b_base64(joined, strict_mode=True), np.uint8)
    except (UnicodeEncodeError, binascii.Error):
        return None
    if raw.size != len(texts) * (size + pads):
        return None
    rows = raw.reshape(len(texts), size + pads)
    if rows[:, size:].any():
        return None
    vectors = np.ascontiguousarray(rows[:, :size]).view(_WIRE_DTYPE)
    return vectors if np.isfinite(vectors).all() else None
