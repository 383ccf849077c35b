"""Which clients may call: by a key and its role or, on a server without keys, from this machine."""

import hmac
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from starlette.requests import HTTPConnection

from proofserve.api.errors import KeyMissing, NotAllowed
from proofserve.web import bearer_key, digest, why_not_local
from proofserve.wire.paths import PROOFS


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
    """The least role that may call a route. This is the rule of every route with a key.

    A route that is not named here is an operator's, unless it only reads.
    """
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


@dataclass(frozen=True, slots=True)
class ApiKey:
    key: str = field(repr=False)
    caller: Caller


LOCAL = Caller("local", Role.OPERATOR)
ANONYMOUS = Caller("anonymous", Role.OPERATOR)


class Access:
    """Finds the caller of a request. With ``open_to_all`` every client is an operator.

    Raises ValueError for keys together with ``open_to_all``, and for two equal keys.
    """

    def __init__(self, keys: Sequence[ApiKey] = (), open_to_all: bool = False) -> None:
        if keys and open_to_all:
            raise ValueError("keys, and access without a key, contradict each other: choose one")
        self.open_to_all = open_to_all
        self._callers = [(digest(each.key.encode()), each.caller) for each in keys]
        if len({kept for kept, _ in self._callers}) < len(keys):
            raise ValueError("two API keys are equal: give each client its own key")

    def with_more(self, keys: Sequence[ApiKey]) -> "Access":
        """The same access, and that of ``keys``, which are none of the present ones."""
        made = Access(keys)
        made._callers = [*self._callers, *made._callers]
        return made

    @property
    def names(self) -> list[str]:
        return [f"{caller.name} ({caller.role})" for _, caller in self._callers]

    def admit(self, connection: HTTPConnection, role: Role) -> Caller:
        """The caller of a request that needs ``role``.

        Raises:
            KeyMissing: the server has keys, and the request has none of them.
            NotAllowed: the key is of a lesser role, or the server has no keys and the request may
                come from another machine.
        """
        caller = self._by_key(connection) if self._callers else self._without_keys(connection)
        if not caller.role.includes(role):
            needed = "a validator's or an operator's" if role is Role.VALIDATOR else "an operator's"
            raise NotAllowed(f"this is a {caller.role}'s key: the call needs {needed}")
        return caller

    def _by_key(self, connection: HTTPConnection) -> Caller:
        given = digest(bearer_key(connection.scope["headers"]))
        found = None
        # Every key is compared, in constant time, so that the response time reveals no key.
        for kept, caller in self._callers:
            if hmac.compare_digest(kept, given):
                found = caller
        if found is None:
            raise KeyMissing("this server needs a key: send Authorization: Bearer KEY")
        return found

    def _without_keys(self, connection: HTTPConnection) -> Caller:
        if self.open_to_all:
            return ANONYMOUS
        if reason := why_not_local(connection):
            raise NotAllowed(
                f"{reason}, and without a key only clients on this machine may call;"
                " start the server with --poc-api-key"
            )
        return LOCAL
