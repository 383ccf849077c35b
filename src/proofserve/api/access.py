"""Which clients may call: by a key and its role or, on a server without keys, from this machine."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from starlette.requests import HTTPConnection

from proofserve.api.errors import KeyMissing, NotAllowed
from proofserve.web.bearer import bearer_key, digest
from proofserve.web.this_machine import why_not_local


class Role(StrEnum):
    """What a key permits: everything to an operator, only GET requests to a viewer."""

    OPERATOR = "operator"
    VIEWER = "viewer"


@dataclass(frozen=True, slots=True)
class Caller:
    """A permitted client. ``requests_per_minute`` is None where the server's limit applies."""

    name: str
    role: Role
    requests_per_minute: int | None = None


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
            NotAllowed: the key is a viewer's, or the server has no keys and the request may come
                from another machine.
        """
        caller = self._by_key(connection) if self._callers else self._without_keys(connection)
        if role is Role.OPERATOR and caller.role is Role.VIEWER:
            raise NotAllowed("this is a viewer's key: the call needs an operator's")
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
