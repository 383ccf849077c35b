"""Which clients may call, and how much: by a key and its role, or from this machine; refusals."""

import hmac
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from starlette.requests import HTTPConnection

from proofserve.protocol.errors import ProtocolError
from proofserve.rounds.errors import Refusal
from proofserve.web import HOUR_S, FixedWindow, bearer_key, digest, why_not_local
from proofserve.wire import PROOFS

# Retry-After when too many calls wait: few of them end sooner. Seconds.
_WAIT_ENDS_S = 5.0


# Why a call is refused, and the status of the answer; 409 for a refusal that is not here. The
# metric of refusals has these names.
STATUS: Mapping[str, int] = {
    Refusal.LANE_UNSET: 400,
    Refusal.NOT_INITIALISED: 400,
    Refusal.UNKNOWN_JOB: 404,
    Refusal.UNKNOWN_MEMBER: 404,
    Refusal.UNKNOWN_NONCE: 404,
    Refusal.UNKNOWN_RECEIPT: 404,
    Refusal.UNKNOWN_ROUND: 404,
    Refusal.RECEIPT_DELETED: 410,
    Refusal.VECTORS_DELETED: 410,
    Refusal.RECEIPT_NOT_LOGGED: 425,
    Refusal.QUEUE_FULL: 429,
    Refusal.WAITS_FULL: 429,
    Refusal.CHAT_BUSY: 503,
    Refusal.SHUTTING_DOWN: 503,
    "body_lost": 400,
    "claims_mismatch": 400,
    "key_missing": 401,
    "not_allowed": 403,
    "verdict_not_found": 404,
    "deployment_mismatch": 409,
    "no_verdict_possible": 409,
    "stays_named": 409,
    "body_too_large": 413,
    "too_many": 429,
    "client_gone": 499,
    "not_enabled": 503,
    "not_ready": 503,
    "owner_lost": 503,
}


class ApiError(Exception):
    """A call that is refused: the client gets ``status``, ``detail`` and ``headers``.

    ``reason`` is one of the names above. ``retry_after_s``: when the client may try again, seconds.
    """

    def __init__(
        self, reason: str, detail: str | Mapping[str, Any], retry_after_s: float | None = None
    ) -> None:
        super().__init__(detail)
        self.reason, self.detail, self.status = reason, detail, STATUS.get(reason, 409)
        self.headers: dict[str, str] = {}
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
        if reason == "key_missing":
            self.headers["WWW-Authenticate"] = "Bearer"


class Role(StrEnum):
    """What a key permits; each role also has what the roles before it have."""

    VIEWER = "viewer"
    """Reading: GET requests."""
    VALIDATOR = "validator"
    """The calls of ``CHALLENGES``, within a budget."""
    OPERATOR = "operator"
    """Everything."""

    def includes(self, other: "Role") -> bool:
        rising = list(Role)
        return rising.index(self) >= rising.index(other)


READING = frozenset({"GET", "HEAD"})
# What a validator asks of a node beside reading: to compute nonces now, and to open vectors.
CHALLENGES = frozenset({f"{PROOFS}/generate", f"{PROOFS}/validate", f"{PROOFS}/open"})


def role_for(methods: Collection[str], path: str) -> Role:
    """The least role that may call a route: an operator, unless it only reads or is named here."""
    if READING.issuperset(methods):
        return Role.VIEWER
    return Role.VALIDATOR if path in CHALLENGES else Role.OPERATOR


@dataclass(frozen=True, slots=True)
class Caller:
    """A permitted client. A limit is None where the server's own applies."""

    name: str
    role: Role
    requests_per_minute: int | None = None
    nonces_per_hour: int | None = None
    """Of a validator's challenges."""


# A key's digest, and whose it is: no key stays in memory.
KnownKey = tuple[bytes, Caller]


def known_key(key: str, caller: Caller) -> KnownKey:
    return digest(key.encode()), caller


LOCAL = Caller("local", Role.OPERATOR)
ANONYMOUS = Caller("anonymous", Role.OPERATOR)


class Access:
    """Finds the caller of a request. With ``open_to_all`` every client is an operator.

    Raises ValueError for keys together with ``open_to_all``, and for two equal keys.
    """

    def __init__(self, keys: Sequence[KnownKey] = (), open_to_all: bool = False) -> None:
        if keys and open_to_all:
            raise ValueError("keys, and access without a key, contradict each other: choose one")
        self.open_to_all = open_to_all
        self._callers = list(keys)
        if len({kept for kept, _ in self._callers}) < len(keys):
            raise ValueError("two API keys are equal: give each client its own key")

    def with_more(self, keys: Sequence[KnownKey]) -> "Access":
        """The same access, and that of ``keys``, which are none of the present ones."""
        made = Access(keys)
        made._callers = [*self._callers, *made._callers]
        return made

    @property
    def names(self) -> list[str]:
        return [f"{caller.name} ({caller.role})" for _, caller in self._callers]

    def admit(self, connection: HTTPConnection, role: Role) -> Caller:
        """The caller of a request that needs ``role``.

        Raises ApiError: the server has keys, and the request has none of them ("key_missing"); or
        the key is of a lesser role, or the server has no keys and the request may come from another
        machine ("not_allowed").
        """
        caller = self._by_key(connection) if self._callers else self._without_keys(connection)
        if not caller.role.includes(role):
            needed = "a validator's or an operator's" if role is Role.VALIDATOR else "an operator's"
            raise ApiError("not_allowed", f"this is a {caller.role}'s key: the call needs {needed}")
        return caller

    def _by_key(self, connection: HTTPConnection) -> Caller:
        given = digest(bearer_key(connection.scope["headers"]))
        found = None
        # Every key is compared, in constant time, so that the response time reveals no key.
        for kept, caller in self._callers:
            if hmac.compare_digest(kept, given):
                found = caller
        if found is None:
            raise ApiError("key_missing", "this server needs a key: send Authorization: Bearer KEY")
        return found

    def _without_keys(self, connection: HTTPConnection) -> Caller:
        if self.open_to_all:
            return ANONYMOUS
        if reason := why_not_local(connection):
            raise ApiError(
                "not_allowed",
                f"{reason}, and without a key only clients on this machine may call;"
                " start the server with --poc-api-key",
            )
        return LOCAL


@dataclass(slots=True, eq=False)
class CallLimits:
    """How much clients may ask: requests a minute, calls that wait, and validators' challenges."""

    per_minute: int = 6000
    open_waits: int = 64
    nonces_per_hour: int = 1000
    _waiting: int = 0
    _minutes: dict[str, FixedWindow] = field(default_factory=dict)
    _hours: dict[str, FixedWindow] = field(default_factory=dict)
    # The validators whose challenge waits for its answer: a key has one at a time.
    _challenging: set[str] = field(default_factory=set)

    def count(self, caller: Caller) -> None:
        """Count one request. Raises ApiError for one beyond the caller's limit."""
        limit = caller.requests_per_minute or self.per_minute
        window = self._minutes.setdefault(caller.name, FixedWindow(limit))
        if not window.take():
            raise ApiError(
                "too_many",
                f"{caller.name} may send {limit} requests a minute"
                " (POC_REQUESTS_PER_MINUTE, or the key's own limit)",
                window.seconds_left,
            )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count one call until the context ends. Raises ApiError if the limit is reached."""
        if self._waiting >= self.open_waits:
            raise ApiError(
                "too_many",
                f"{self._waiting} calls wait for their answer, limit is {self.open_waits}"
                " (POC_MAX_OPEN_WAITS); a job without wait needs no open connection",
                _WAIT_ENDS_S,
            )
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    @contextmanager
    def challenge(self, caller: Caller, nonces: int) -> Iterator[None]:
        """Count a call about ``nonces`` until the context ends; an operator's is not counted.

        The nonces count from now on, whatever becomes of the call: a client that leaves before the
        answer has used the engine. Raises ApiError beyond the key's budget of an hour and beside
        another open call of it, and ProtocolError for more nonces than an hour has.
        """
        if caller.role is not Role.VALIDATOR:
            yield
            return
        if caller.name in self._challenging:
            raise ApiError(
                "too_many",
                f"a challenge of {caller.name} waits for its answer, and a validator's key has one"
                " at a time",
                _WAIT_ENDS_S,
            )
        limit = caller.nonces_per_hour or self.nonces_per_hour
        if nonces > limit:
            raise ProtocolError(
                "nonces", f"{nonces} are more than the {limit} that {caller.name} has in an hour"
            )
        window = self._hours.setdefault(caller.name, FixedWindow(limit, seconds=HOUR_S))
        if not window.take(nonces):
            raise ApiError(
                "too_many",
                f"{caller.name} may have {limit} nonces computed in an hour"
                f" (POC_CHALLENGE_NONCES_PER_HOUR, or the key's own limit); {window.left} are left,"
                f" and all of them again in {window.seconds_left:.0f} s",
                window.seconds_left,
            )
        self._challenging.add(caller.name)
        try:
            yield
        finally:
            self._challenging.remove(caller.name)
