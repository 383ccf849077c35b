"""Who may call: by a key and its role, or, where there are no keys, whoever is on this machine."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from proofserve.api.errors import KeyMissing, NotAllowed

# Headers by which a proxy says that it speaks for somebody else.
_FORWARDED = {"forwarded", "via", "x-real-ip"}
_FORWARDED_PREFIX = "x-forwarded-"


class Role(StrEnum):
    """What a key is good for: an operator may do everything, a viewer may only look."""

    OPERATOR = "operator"
    VIEWER = "viewer"


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who may call. ``requests_per_minute`` is None where the general limit applies."""

    name: str
    role: Role
    requests_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key and who comes with it."""

    key: str = field(repr=False)
    caller: Caller


LOCAL = Caller("local", Role.OPERATOR)
ANONYMOUS = Caller("anonymous", Role.OPERATOR)


class Access:
    """Tells who calls. ``open_to_all`` lets anybody operate; it goes with no keys at all.

    Raises ValueError for keys beside ``open_to_all``, and for two that are equal.
    """

    def __init__(self, keys: Sequence[ApiKey] = (), open_to_all: bool = False) -> None:
        if keys and open_to_all:
            raise ValueError("keys, and access without a key, contradict each other: choose one")
        self.open_to_all = open_to_all
        # No key lies in memory for longer than it is read, and all digests are equally long.
        self._callers = [(_digest(each.key), each.caller) for each in keys]
        if len({digest for digest, _ in self._callers}) < len(keys):
            raise ValueError("two API keys are equal: give each holder another")

    @property
    def names(self) -> list[str]:
        """The holders of keys, each with its role."""
        return [f"{caller.name} ({caller.role})" for _, caller in self._callers]

    def admit(self, asking: HTTPConnection, role: Role) -> Caller:
        """Who is ``asking`` for something that needs ``role``.

        Raises:
            KeyMissing: there are keys, and the request has none of them.
            NotAllowed: the key is a viewer's, or there are no keys and it comes from elsewhere.
        """
        caller = self._holder(asking) if self._callers else self._without_keys(asking)
        if role is Role.OPERATOR and caller.role is Role.VIEWER:
            raise NotAllowed("this is a viewer's key: the call needs an operator's")
        return caller

    def _holder(self, asking: HTTPConnection) -> Caller:
        given = _digest(_bearer(asking.headers.getlist("authorization")))
        found = None
        # All of them, each in the same time: how long it takes tells nothing about any key.
        for digest, caller in self._callers:
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None:
            raise KeyMissing("this server asks for a key: send Authorization: Bearer KEY")
        return found

    def _without_keys(self, asking: HTTPConnection) -> Caller:
        if self.open_to_all:
            return ANONYMOUS
        if reason := _why_not_local(asking):
            raise NotAllowed(
                f"{reason}, and without a key only clients on this machine may call;"
                " start the server with --poc-api-key"
            )
        return LOCAL


def is_loopback(host: str) -> bool:
    """Whether ``host`` is an address of this machine that no other machine can reach or have."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def _why_not_local(asking: HTTPConnection) -> str | None:
    """Why a request may be somebody's on another machine, None if it is from this one."""
    # Behind a proxy every peer is the proxy. One that a server trusts may even have rewritten it.
    for name in asking.headers:
        if name in _FORWARDED or name.startswith(_FORWARDED_PREFIX):
            return f"a proxy passed this on ({name})"
    # A browser on this machine carries the requests of whatever page it shows.
    for origin in asking.headers.getlist("origin"):
        if not _is_local_page(origin):
            return "a web page from elsewhere sent this"
    if not _is_local_peer(asking):
        return "this comes from another machine"
    return None


def _is_local_peer(asking: HTTPConnection) -> bool:
    if asking.client is not None:
        return is_loopback(asking.client.host)
    # A unix socket has a path and no port, and its peer is a process that may open its file.
    server = asking.scope.get("server")
    return server is not None and server[1] is None


def _is_local_page(origin: str) -> bool:
    try:
        host = urlsplit(origin).hostname or ""
    except ValueError:
        return False
    return host == "localhost" or is_loopback(host)


def _bearer(headers: Sequence[str]) -> str:
    """The one key of a request; empty, which is nobody's, where there is none or several."""
    if len(headers) != 1:
        return ""
    scheme, _, key = headers[0].partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
