"""Tokens of an answer, read from its last bytes; the rest is relayed unparsed."""

from typing import Annotated

import msgspec

# The usage object of a chat answer or of a stream's last event has about a hundred bytes; what
# follows it are a few short fields and "[DONE]".
TAIL_BYTES = 2048
_MARK = b'"usage":'
Count = Annotated[int, msgspec.Meta(ge=0)]


class Reported(msgspec.Struct, gc=False):
    """A usage object. The Responses API has other names; embeddings have no completion tokens."""

    prompt_tokens: Count | None = None
    input_tokens: Count | None = None
    completion_tokens: Count | None = None
    output_tokens: Count | None = None


_DECODER = msgspec.json.Decoder(Reported)


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt: int
    completion: int


def tail_of(before: bytes, data: bytes) -> bytes:
    if len(data) >= TAIL_BYTES:
        return data[-TAIL_BYTES:]
    return (before + data)[-TAIL_BYTES:]


def read_usage(tail: bytes) -> Usage | None:
    """The last usage in ``tail``; None if there is none, or if it lies further back.

    A quoted ``"usage":`` of the model's own text cannot be mistaken for it: inside a JSON string
    its quotes are escaped.
    """
    at = tail.rfind(_MARK)
    text = _object(tail, at + len(_MARK)) if at >= 0 else None
    if text is None:
        return None
    try:
        found = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    prompt = found.input_tokens if found.prompt_tokens is None else found.prompt_tokens
    if prompt is None:
        return None
    return Usage(prompt, found.completion_tokens or found.output_tokens or 0)


def _object(tail: bytes, start: int) -> bytes | None:
    """The JSON object that begins at ``start``; None if it does not end in ``tail``."""
    end = start
    while (end := tail.find(b"}", end) + 1) > 0:
        if tail.count(b"{", start, end) == tail.count(b"}", start, end):
            return tail[start:end]
    return None
