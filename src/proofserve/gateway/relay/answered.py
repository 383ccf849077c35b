"""Which client got which answer from which backend, for the answers' receipts."""

from collections.abc import Callable
from typing import NamedTuple

# vLLM makes the id of an answer of the request's id.
_PREFIXES = {b"/v1/chat/completions": b"chatcmpl-", b"/v1/completions": b"cmpl-"}
# As long as a node keeps receipts by default.
KEEP_S = 7 * 86_400.0


class Answerer(NamedTuple):
    """Names of a client and of the backend that answered it."""

    client: str
    backend: str


class AnsweredRequests:
    """Knows at least the newest ``most`` / 2 answers, at most ``most``, up to ``keep_s`` seconds.

    Two generations: when the younger is full or old, it becomes the older, and the older is
    forgotten. So an answer costs no time of its own and no place in an order. ``clock`` gives
    seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float], keep_s: float = KEEP_S) -> None:
        self._most = most
        self._half_life = keep_s / 2
        self._clock = clock
        self._began = clock()
        self._young: dict[bytes, Answerer] = {}
        self._old: dict[bytes, Answerer] = {}
        # One object for each pair, whatever the number of answers.
        self._pairs: dict[Answerer, Answerer] = {}

    def add(self, target: bytes, request_id: bytes, client: str, backend: str) -> None:
        """The answer to ``request_id`` at ``target`` began. An id of another client stays its."""
        prefix = _PREFIXES.get(target.partition(b"?")[0])
        if prefix is None or not self._most:
            return
        self._forget()
        response_id = prefix + request_id
        known = self._young.get(response_id) or self._old.get(response_id)
        if known is None or known.client == client:
            pair = Answerer(client, backend)
            self._young[response_id] = self._pairs.setdefault(pair, pair)

    def backend_of(self, response_id: str, client: str) -> str | None:
        """The backend that gave ``client`` this answer; None if it is not known or another's."""
        self._forget()
        key = response_id.encode(errors="replace")
        found = self._young.get(key) or self._old.get(key)
        return found.backend if found is not None and found.client == client else None

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def _forget(self) -> None:
        age = self._clock() - self._began
        if len(self._young) * 2 >= self._most or age >= self._half_life:
            # Both are too old if no request came for a long time.
            self._old = self._young if age < 2 * self._half_life else {}
            self._young = {}
            self._began = self._clock()
