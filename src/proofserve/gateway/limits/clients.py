"""Who asks, and how much of the gateway each may use."""

import hashlib
from collections.abc import Sequence

import msgspec

from proofserve.gateway.failures import (
    BEYOND_BUDGET,
    REQUEST_RATE,
    TOKEN_RATE,
    TOO_MANY_AT_ONCE,
    Failure,
)
from proofserve.gateway.limits.budget import Budget, Meter
from proofserve.gateway.limits.request_body import RequestFields
from proofserve.gateway.limits.usage import Usage
from proofserve.gateway.records import ClientSpec

ANONYMOUS = ClientSpec("anonymous", "")


class Charge(msgspec.Struct, frozen=True, gc=False):
    """Tokens set aside for one request, and the end of the window they were taken from."""

    tokens: int
    window_end: float


NOTHING = Charge(0, 0.0)


class Client:
    """One key's share. Every ``admit`` that did not refuse is followed by one ``settle``."""

    def __init__(self, spec: ClientSpec, meter: Meter) -> None:
        self.name = spec.name
        self.in_flight = 0
        self._concurrency = spec.concurrency
        self._requests = _budget(meter, f"{spec.name} requests", spec.requests_per_minute)
        self._tokens = _budget(meter, f"{spec.name} tokens", spec.tokens_per_minute)

    def admit(self, order: RequestFields, size: int) -> Charge | Failure:
        """Let a request of ``size`` bytes in, or say which limit it would exceed."""
        if self._concurrency is not None and self.in_flight >= self._concurrency:
            return TOO_MANY_AT_ONCE
        charge = NOTHING
        if self._tokens is not None:
            # More than will be used, most likely: the rest comes back when that is known.
            tokens = order.most_tokens(size)
            if tokens > self._tokens.per_minute:
                return BEYOND_BUDGET.saying(
                    f"This request may cost {tokens} tokens, and this key has "
                    f"{self._tokens.per_minute} per minute in all. Ask for fewer with max_tokens."
                )
            if not self._tokens.take(tokens):
                return TOKEN_RATE.after(self._tokens.seconds_left())
            charge = Charge(tokens, self._tokens.window_end)
        if self._requests is not None and not self._requests.take(1):
            self._return(charge, 0)
            return REQUEST_RATE.after(self._requests.seconds_left())
        self.in_flight += 1
        return charge

    def settle(self, charge: Charge, used: int | None) -> None:
        """A request has ended; ``used`` tokens, None if nobody knows and the charge stands."""
        self.in_flight -= 1
        if used is not None:
            self._return(charge, used)

    def _return(self, charge: Charge, used: int) -> None:
        if self._tokens is None:
            return
        if used <= charge.tokens:
            self._tokens.give_back(charge.tokens - used, charge.window_end)
        else:
            self._tokens.charge(used - charge.tokens)


class Clients:
    """The holders of keys; without any, everybody is one anonymous client without limits."""

    def __init__(self, specs: Sequence[ClientSpec]) -> None:
        meter = Meter()
        self.open = not specs
        self._anonymous = Client(ANONYMOUS, meter)
        # By digest: how long a look-up takes tells nothing about a key, and no key lies in memory.
        self._by_digest = {_digest(f"Bearer {s.key}".encode()): Client(s, meter) for s in specs}

    def find(self, authorization: bytes) -> Client | None:
        """The client of an Authorization header; None if nobody has that key."""
        if self.open:
            return self._anonymous
        return self._by_digest.get(_digest(authorization))

    def all(self) -> list[Client]:
        """Everybody, for metrics."""
        return list(self._by_digest.values()) or [self._anonymous]


def total(usage: Usage) -> int:
    """Tokens that count against a budget."""
    return usage.prompt + usage.completion


def _budget(meter: Meter, name: str, per_minute: int | None) -> Budget | None:
    return None if per_minute is None else Budget(meter, name, per_minute)


def _digest(authorization: bytes) -> bytes:
    return hashlib.sha256(authorization).digest()
