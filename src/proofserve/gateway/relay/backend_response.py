"""What is known of an answer that is relayed: its status, its pace, and its last bytes."""

from proofserve.gateway.metrics import Series
from proofserve.gateway.relay.usage import TAIL_BYTES, read_usage, tail_of

# An event may be put in only where an event and a chunk end.
BETWEEN_EVENTS = (b"\n\n\r\n", b"\r\n\r\n\r\n")


class BackendResponse:
    """A backend's answer, from its head on. Times are seconds of the loop's clock."""

    __slots__ = ("_chunked", "_series", "_stream", "_tail", "last", "status")

    def __init__(self, status: int, head: bytes, data: bytes, series: Series, now: float) -> None:
        self.status = status
        self.last = now
        self._series = series
        self._stream = b"text/event-stream" in head
        self._chunked = b"chunked" in head
        self._tail = data[-TAIL_BYTES:]

    def goes_on(self, data: bytes, now: float) -> None:
        if self._stream:
            self._series.between.observe(now - self.last)
        self.last = now
        self._tail = tail_of(self._tail, data)

    @property
    def outcome(self) -> str:
        return "ok" if self.status < 400 else f"status_{self.status}"

    @property
    def takes_event(self) -> bool:
        between = not self._tail or self._tail.endswith(BETWEEN_EVENTS)
        return self._stream and self._chunked and between

    def end(self, seconds: float) -> int | None:
        """Tokens that the whole answer cost, None if the backend did not say; it took ``seconds``.

        A refusal has cost nothing.
        """
        series = self._series
        series.duration.observe(seconds)
        usage = read_usage(self._tail)
        if usage is None:
            return 0 if self.status >= 400 else None
        series.prompt_tokens += usage.prompt
        series.completion_tokens += usage.completion
        return usage.prompt + usage.completion
