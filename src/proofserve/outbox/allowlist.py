"""The addresses to which callbacks may go: origins by name, networks by address."""

import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import httpx

Address = IPv4Address | IPv6Address

# The entry for this machine; the only one by default.
LOOPBACK = "loopback"
_LOOPBACK_NETWORKS = ("127.0.0.0/8", "::1/128")
_NAME = re.compile(r"[a-z0-9._-]+", re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}

_Origin = tuple[str, str, int]


class ForbiddenTarget(httpx.TransportError):
    """No entry of the allowlist permits the address of a callback."""


class Allowlist:
    """Entries are ``scheme://host[:port]``, networks like ``10.0.0.0/8``, and ``loopback``.

    An origin is trusted by its name, whatever its addresses: the operator chose that name. A
    network is trusted by address; name, scheme and port do not matter. Raises ValueError for any
    other entry.
    """

    def __init__(self, entries: Iterable[str] = (LOOPBACK,)) -> None:
        self._entries = tuple(entries)
        self._origins: set[_Origin] = set()
        self._networks: list[IPv4Network | IPv6Network] = []
        for entry in self._entries:
            if "://" in entry:
                self._origins.add(_entry_origin(entry))
            else:
                texts = _LOOPBACK_NETWORKS if entry == LOOPBACK else (entry,)
                self._networks += [_network(text) for text in texts]

    def refusal(self, url: str, addresses: Iterable[Address] | None = None) -> str | None:
        """Why no callback may go to ``url``; None if callbacks may.

        Without ``addresses`` of its host, only a host that is written as an address is checked.
        """
        try:
            parsed = httpx.URL(url)
            return self._refusal(parsed, addresses or _literal(parsed.host))
        except httpx.InvalidURL:
            return "is not a URL"

    def require(self, url: httpx.URL, addresses: Iterable[Address]) -> None:
        """Raise ForbiddenTarget unless a callback to ``url`` may go to each of ``addresses``."""
        if reason := self._refusal(url, addresses):
            raise ForbiddenTarget(reason)

    def _refusal(self, url: httpx.URL, addresses: Iterable[Address] | None) -> str | None:
        """``addresses`` is None while they are not known."""
        if url.scheme not in _PORTS:
            return "must be an http or https address"
        if url.userinfo:
            return "must not hold a user name or a password"
        if _origin(url) in self._origins:
            return None
        if self._networks and addresses is None:
            return None
        outside = [str(each) for each in addresses or () if not self._contains(each)]
        if self._networks and not outside:
            return None
        where = f" at {outside[0]}" if outside and outside[0] != url.host else ""
        return (
            f"leads to {url.host}{where}, and callbacks may go to {', '.join(self._entries)} only;"
            " --poc-callback-allow adds to that"
        )

    def _contains(self, address: Address) -> bool:
        # The system connects to an IPv4 address in IPv6 notation by IPv4.
        plain = getattr(address, "ipv4_mapped", None) or address
        return any(plain in network for network in self._networks)


def _literal(host: str) -> list[Address] | None:
    """The address in ``host``, in any notation that the system accepts; None for a name."""
    with suppress(ValueError):
        return [ip_address(host)]
    # 2130706433, 0x7f.1 and 0177.0.0.1 are all 127.0.0.1.
    with suppress(OSError):
        return [IPv4Address(socket.inet_aton(host))]
    return None


def _origin(url: httpx.URL) -> _Origin:
    return url.scheme, url.host.lower(), url.port or _PORTS[url.scheme]


def _entry_origin(entry: str) -> _Origin:
    try:
        url = httpx.URL(entry)
    except httpx.InvalidURL as error:
        raise ValueError(f"{entry!r} is not an origin: {error}") from None
    named = bool(_NAME.fullmatch(url.host)) or _literal(url.host) is not None
    bare = url.path in {"", "/"} and not url.query and not url.fragment and not url.userinfo
    if url.scheme not in _PORTS or not named or not bare:
        raise ValueError(f"{entry!r} is not an origin like https://host or http://host:9000")
    return _origin(url)


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is neither an origin like https://host:9000, nor a network like"
            f" 10.0.0.0/8, nor {LOOPBACK}"
        ) from None
