"""The clients of the gateway by their keys, and what each may use."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from proofserve.gateway import failures
from proofserve.gateway.failures import Failure
from proofserve.gateway.limits.request_body import RequestFields
from proofserve.gateway.records import ClientSpec
from proofserve.web import FixedWindow, digest

# No request is matched with this key.
ANONYMOUS = ClientSpec(name="anonymous", key="none")
Clock = Callable[[], float]


class Window(Protocol):
    """A count per minute, of this gateway alone or of several together."""

    end: float
    limit: int

    def take(self, amount: int = 1) -> bool: ...
    def charge(self, amount: int) -> None: ...
    def give_back(self, amount: int, end: float) -> None: ...
    @property
    def seconds_left(self) -> float: ...


# A window by its name, which is the same in every gateway with these keys, and its limit.
NewWindow = Callable[[str, int], Window]


class Charge(msgspec.Struct, frozen=True, gc=False):
    """Tokens set aside for one request, and the end of the window they were taken from."""

    tokens: int
    window_end: float


NOTHING = Charge(0, 0.0)


class Client:
    """One key's share. Every ``admit`` that did not refuse is followed by one ``settle``."""

    def __init__(self, spec: ClientSpec, new_window: NewWindow) -> None:
        self.name = spec.name
        self.in_flight = 0
        self.refused: Counter[str] = Counter()
        """Requests that one of its limits refused, by code, for the dashboard."""
        self._concurrency = spec.concurrency
        requests, tokens = spec.requests_per_minute, spec.tokens_per_minute
        self._requests = new_window(f"{spec.name}:requests", requests) if requests else None
        self._tokens = new_window(f"{spec.name}:tokens", tokens) if tokens else None

    def admit(self, fields: RequestFields, size: int) -> Charge | Failure:
        """The charge of a request of ``size`` bytes, or the failure that names the limit."""
        if self._concurrency is not None and self.in_flight >= self._concurrency:
            return failures.TOO_MANY_AT_ONCE
        charge = NOTHING
        if self._tokens is not None:
            # The most that the request may use. What it does not use comes back at its end.
            tokens = fields.most_tokens(size)
            if tokens > self._tokens.limit:
                return failures.BEYOND_BUDGET.saying(
                    f"This request may cost {tokens} tokens, and this key has "
                    f"{self._tokens.limit} per minute in all. Ask for fewer with max_tokens."
                )
            if not self._tokens.take(tokens):
                return failures.TOKEN_RATE.after(self._tokens.seconds_left)
            charge = Charge(tokens, self._tokens.end)
        if self._requests is not None and not self._requests.take():
            if self._tokens is not None:
                self._tokens.give_back(charge.tokens, charge.window_end)
            return failures.REQUEST_RATE.after(self._requests.seconds_left)
        self.in_flight += 1
        return charge

    def settle(self, charge: Charge, used: int | None) -> None:
        """A request has ended. ``used`` is in tokens; None if unknown: then the charge stands."""
        self.in_flight -= 1
        if used is None or self._tokens is None:
            return
        if used <= charge.tokens:
            self._tokens.give_back(charge.tokens - used, charge.window_end)
        else:
            self._tokens.charge(used - charge.tokens)


class Clients:
    """All clients. Without keys every request is of one anonymous client without limits.

    ``new_window`` makes the windows of all limits; without it they are this gateway's own.
    """

    def __init__(
        self,
        specs: Sequence[ClientSpec],
        clock: Clock = time.monotonic,
        new_window: NewWindow | None = None,
    ) -> None:
        def own_window(_name: str, limit: int) -> Window:
            return FixedWindow(limit, clock)

        new_window = new_window or own_window
        self.open = not specs
        self._anonymous = Client(ANONYMOUS, new_window)
        # By digest: the time of a look-up tells nothing about a key, and no key lies in memory.
        self._by_digest = {digest(s.key.encode()): Client(s, new_window) for s in specs}

    def find(self, key: bytes) -> Client | None:
        if self.open:
            return self._anonymous
        return self._by_digest.get(digest(key))

    def all(self) -> list[Client]:
        return list(self._by_digest.values()) or [self._anonymous]
