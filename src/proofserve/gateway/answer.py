"""What goes to a backend and comes back: heads, the answer, and the tokens that it cost."""

import enum
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

import msgspec

from proofserve.gateway.metrics import Series

# Headers of one hop (RFC 9110, section 7.6.1), and those that the gateway writes itself.
HOP_BY_HOP = frozenset(
    b"connection content-length expect host keep-alive proxy-authenticate proxy-authorization"
    b" proxy-connection te trailer transfer-encoding upgrade x-request-id".split()
)
_ONE_HOP = re.compile(rb"\r\n(?:connection|keep-alive|x-request-id):[^\r\n]*", re.IGNORECASE)
_CORS = re.compile(rb"\r\n(?:access-control-[a-z-]+|vary):[^\r\n]*", re.IGNORECASE)
# The usage object of a chat answer or of a stream's last event has about a hundred bytes; what
# follows it are a few short fields and "[DONE]".
TAIL_BYTES = 2048
_MARK = b'"usage":'
Count = Annotated[int, msgspec.Meta(ge=0)]
# An event may be put in only where an event and a chunk end.
BETWEEN_EVENTS = (b"\n\n\r\n", b"\r\n\r\n\r\n")

Header = tuple[bytes, bytes]
# By name in lower case.
Values = Mapping[bytes, bytes]


def request_head(
    target: bytes,
    host: bytes,
    headers: Sequence[Header],
    dropped: Collection[bytes],
    length: int,
    own: bytes,
) -> bytes:
    """The head of a POST to a backend, without ``dropped`` headers and with our ``own`` lines."""
    kept = b"".join([b"%s: %s\r\n" % header for header in headers if header[0] not in dropped])
    line = b"POST %s HTTP/1.1\r\nhost: %s\r\n%scontent-length: %d\r\n%s\r\n"
    return line % (target, host, kept, length, own)


def response_head(head: bytes, own: bytes, keep_alive: bool) -> bytes:
    """A backend's head (without its empty line) as the client gets it, with our ``own`` lines."""
    close = b"" if keep_alive else b"connection: close\r\n"
    return b"%s\r\n%s%s\r\n" % (_ONE_HOP.sub(b"", head), own, close)


class CrossOrigin:
    """Which web pages may read answers. With no origins configured the backend decides."""

    def __init__(self, origins: Sequence[str]) -> None:
        self.configured = bool(origins)
        self._any = "*" in origins
        self._origins = {origin.encode() for origin in origins}

    def lines(self, origin: bytes | None) -> bytes:
        if origin is None or not (self._any or origin in self._origins):
            return b""
        return b"access-control-allow-origin: %s\r\nvary: Origin\r\n" % origin

    def strip(self, head: bytes) -> bytes:
        return _CORS.sub(b"", head) if self.configured else head


class Usage(enum.Enum):
    """Where an answer says how many tokens it cost."""

    LAST = enum.auto()
    FIRST = enum.auto()  # before results of any length
    NONE = enum.auto()  # it costs none, or does not say


class BackendResponse:
    """A backend's answer, from its head on. Times are seconds of the loop's clock."""

    __slots__ = ("_chunked", "_kept", "_series", "_stream", "_usage", "last", "status", "tokens")

    def __init__(
        self, status: int, head: bytes, data: bytes, series: Series, now: float, usage: Usage
    ) -> None:
        self.status = status
        self.last = now
        self._series = series
        self._stream = b"text/event-stream" in head
        self._chunked = b"chunked" in head
        self._usage = usage
        # Of prompt and completion, as the backend said at the end.
        self.tokens: tuple[int, int] | None = None
        # The end of the answer; its beginning where that says what it cost.
        self._kept = data[:TAIL_BYTES] if usage is Usage.FIRST else data[-TAIL_BYTES:]

    def goes_on(self, data: bytes, now: float) -> None:
        if self._stream:
            self._series.between.observe(now - self.last)
        self.last = now
        if self._usage is not Usage.FIRST:
            self._kept = tail_of(self._kept, data)
        elif len(self._kept) < TAIL_BYTES:
            self._kept = (self._kept + data)[:TAIL_BYTES]

    @property
    def outcome(self) -> str:
        return "ok" if self.status < 400 else f"status_{self.status}"

    @property
    def takes_event(self) -> bool:
        between = not self._kept or self._kept.endswith(BETWEEN_EVENTS)
        return self._stream and self._chunked and between

    def end(self, seconds: float) -> int | None:
        """Tokens that the answer cost, None if the backend did not say; a refusal costs 0."""
        series = self._series
        series.duration.observe(seconds)
        if self._usage is Usage.NONE:
            return 0
        used = read_usage(self._kept)
        if used is None:
            return 0 if self.status >= 400 else None
        series.prompt_tokens += used.prompt
        series.completion_tokens += used.completion
        series.audio_seconds += used.seconds or 0
        if used.seconds is not None:
            return None
        self.tokens = (used.prompt, used.completion)
        return sum(self.tokens)


class Reported(msgspec.Struct, gc=False):
    """A usage object: each API has its own names, and embeddings have no completion tokens.

    Anthropic's input tokens are those beside the cached ones. A transcription has ``seconds``.
    """

    prompt_tokens: Count | None = None
    input_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None
    completion_tokens: Count | None = None
    output_tokens: Count | None = None
    seconds: Count | None = None

    @property
    def prompt(self) -> int:
        cached = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return self.prompt_tokens or (self.input_tokens or 0) + cached

    @property
    def completion(self) -> int:
        return self.completion_tokens or self.output_tokens or 0


_DECODER = msgspec.json.Decoder(Reported)


def tail_of(before: bytes, data: bytes) -> bytes:
    if len(data) >= TAIL_BYTES:
        return data[-TAIL_BYTES:]
    return (before + data)[-TAIL_BYTES:]


def read_usage(kept: bytes) -> Reported | None:
    """The last usage in ``kept``; None if it has none.

    A ``"usage":`` in the model's own text cannot be mistaken for it: its quotes are escaped.
    """
    at = kept.rfind(_MARK)
    text = _object(kept, at + len(_MARK)) if at >= 0 else None
    if text is None:
        return None
    try:
        found = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    said = (found.prompt_tokens, found.input_tokens, found.seconds)
    return None if said == (None, None, None) else found


def _object(tail: bytes, start: int) -> bytes | None:
    """The JSON object that begins at ``start``; None if it does not end in ``tail``."""
    end = start
    while (end := tail.find(b"}", end) + 1) > 0:
        if tail.count(b"{", start, end) == tail.count(b"}", start, end):
            return tail[start:end]
    return None
