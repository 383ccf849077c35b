"""Where callbacks may go: only to addresses of the allowlist.

For each attempt the sender looks the name up once and connects to an address that it has checked.
A check of the URL alone is not enough: the owner of a name can change its addresses at any time.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

import httpx

Address = IPv4Address | IPv6Address

# The entry for this machine; the only one by default.
LOOPBACK = "loopback"
_NAME = re.compile(r"[a-z0-9._-]+", re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}

_Origin = tuple[str, str, int]
# The addresses of a host, for a port. Raises OSError.
Resolve = Callable[[str, int], Coroutine[Any, Any, Sequence[Address]]]

# Longest wait of a request for a lookup of the name in its URL. Seconds.
_LOOKUP_S = 2.0
# Most lookups at a time: a slow resolver must not use all threads of the process.
_MOST_LOOKUPS = 4


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
                texts = ("127.0.0.0/8", "::1/128") if entry == LOOPBACK else (entry,)
                self._networks += [_network(text) for text in texts]

    def refusal(
        self, url: str | httpx.URL, addresses: Sequence[Address] | None = None
    ) -> str | None:
        """Why no callback may go to ``url``, and to each of ``addresses``; None if callbacks may.

        Without ``addresses`` of its host, only a host that is written as an address is checked.
        """
        try:
            url = httpx.URL(url)
        except httpx.InvalidURL:
            return "is not a URL"
        addresses = addresses or _literal(url.host)
        if url.scheme not in _PORTS:
            return "must be an http or https address"
        if url.userinfo:
            return "must not hold a user name or a password"
        if _origin(url) in self._origins:
            return None
        outside = []
        for each in addresses or ():
            # The system connects to an IPv4 address in IPv6 notation by IPv4.
            plain = getattr(each, "ipv4_mapped", None) or each
            if not any(plain in network for network in self._networks):
                outside.append(str(each))
        if self._networks and not outside:
            return None
        where = f" at {outside[0]}" if outside and outside[0] != url.host else ""
        return (
            f"leads to {url.host}{where}, and callbacks may go to {', '.join(self._entries)} only;"
            " --poc-callback-allow adds to that"
        )


def _literal(host: str) -> list[Address] | None:
    """The address in ``host``, in any notation that the system accepts; None for a name."""
    with contextlib.suppress(ValueError):
        return [ip_address(host)]
    # 2130706433, 0x7f.1 and 0177.0.0.1 are all 127.0.0.1.
    with contextlib.suppress(OSError):
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


async def resolve(host: str, port: int) -> Sequence[Address]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A list, because its order says which address to try first.
    return [ip_address(address[0]) for *_, address in found]


class CheckedTransport(httpx.AsyncHTTPTransport):
    """HTTP to allowed addresses only. Raises ForbiddenTarget before it sends anything."""

    def __init__(self, allowlist: Allowlist, resolve: Resolve) -> None:
        # No connection is kept, because another name may lead to the same address.
        super().__init__(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
        self._allowlist = allowlist
        self._resolve = resolve

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` to the first address of its host that accepts a connection."""
        host = request.url.host
        try:
            addresses = await self._resolve(host, request.url.port or 0)
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(f"{host} cannot be looked up: {error}") from error
        if reason := self._allowlist.refusal(request.url, addresses):
            raise ForbiddenTarget(reason)
        refused = httpx.ConnectError(f"{host} has no address", request=request)
        for address in addresses:
            sent = httpx.Request(
                request.method,
                request.url.copy_with(host=str(address)),
                headers=request.headers,
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": host},
            )
            try:
                return await super().handle_async_request(sent)
            except httpx.ConnectError as error:
                refused = error
        raise refused


@dataclass(slots=True, eq=False)
class UrlCheck:
    """Checks a callback URL when a request names it; each attempt checks the addresses again.

    ``timeout_s`` limits a call in seconds. A lookup that takes longer continues on its own.
    """

    allowlist: Allowlist
    resolve: Resolve = resolve
    timeout_s: float = _LOOKUP_S
    _lookups: "dict[str, asyncio.Task[Sequence[Address]]]" = field(default_factory=dict)

    async def __call__(self, url: str) -> str | None:
        """A warning about ``url``, None for none. Raises ValueError if no callback may go there."""
        if reason := self.allowlist.refusal(url):
            raise ValueError(reason)
        host = httpx.URL(url).host
        try:
            addresses = await self._addresses(host)
        except (OSError, UnicodeError) as error:
            return f"{host} could not be resolved ({error}): callbacks are tried nevertheless"
        reasons = [self.allowlist.refusal(url, [address]) for address in addresses]
        refused = [reason for reason in reasons if reason]
        if refused and len(refused) == len(reasons):
            raise ValueError(refused[0])
        return f"callbacks fail while it {refused[0]}" if refused else None

    async def _addresses(self, host: str) -> Sequence[Address]:
        lookup = self._lookups.get(host)
        if lookup is None:
            if len(self._lookups) >= _MOST_LOOKUPS:
                raise OSError("the resolver is busy with other names")
            lookup = asyncio.create_task(self.resolve(host, 0))
            self._lookups[host] = lookup
            lookup.add_done_callback(lambda done: self._end(host, done))
        # Cancelling would not end the thread that asks the resolver, so the lookup continues.
        await asyncio.wait({lookup}, timeout=self.timeout_s)
        if not lookup.done():
            raise OSError(f"no answer within {self.timeout_s:g} s")
        return lookup.result()

    def _end(self, host: str, lookup: "asyncio.Task[Sequence[Address]]") -> None:
        del self._lookups[host]
        if not lookup.cancelled():
            # Retrieved so that asyncio does not log it: the callers have their answers.
            lookup.exception()
