"""Connects callbacks to their targets, and only to addresses of the allowlist.

For each attempt the sender looks the name up once and connects to an address that it has checked.
A check of the URL alone is not enough: the owner of a name can change its addresses at any time.
"""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from ipaddress import ip_address
from typing import Any

import httpx

from proofserve.outbox.allowlist import Address, Allowlist

# The addresses of a host, for a port. Raises OSError.
Resolve = Callable[[str, int], Coroutine[Any, Any, Sequence[Address]]]

# Longest wait of a request for a lookup of the name in its URL. Seconds.
_LOOKUP_S = 2.0
# Most lookups at a time: a slow resolver must not use all threads of the process.
_MOST_LOOKUPS = 4


async def resolve(host: str, port: int) -> Sequence[Address]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A list, because its order says which address to try first.
    return [ip_address(address[0]) for *_, address in found]


class UrlCheck:
    """Checks a callback URL when a request names it; each attempt checks the addresses again.

    ``timeout_s`` limits a call in seconds. A lookup that takes longer continues on its own.
    """

    def __init__(
        self, allowlist: Allowlist, resolve: Resolve = resolve, timeout_s: float = _LOOKUP_S
    ) -> None:
        self._allowlist = allowlist
        self._resolve = resolve
        self._timeout_s = timeout_s
        self._lookups: dict[str, asyncio.Task[Sequence[Address]]] = {}

    async def __call__(self, url: str) -> str | None:
        """A warning about ``url``, None for none. Raises ValueError if no callback may go there."""
        if reason := self._allowlist.refusal(url):
            raise ValueError(reason)
        host = httpx.URL(url).host
        try:
            addresses = await self._addresses(host)
        except (OSError, UnicodeError) as error:
            return f"{host} could not be resolved ({error}): callbacks are tried nevertheless"
        reasons = [self._allowlist.refusal(url, [address]) for address in addresses]
        refused = [reason for reason in reasons if reason]
        if refused and len(refused) == len(reasons):
            raise ValueError(refused[0])
        return f"callbacks fail while it {refused[0]}" if refused else None

    async def _addresses(self, host: str) -> Sequence[Address]:
        lookup = self._lookups.get(host)
        if lookup is None:
            if len(self._lookups) >= _MOST_LOOKUPS:
                raise OSError("the resolver is busy with other names")
            lookup = asyncio.create_task(self._resolve(host, 0))
            self._lookups[host] = lookup
            lookup.add_done_callback(lambda done: self._end(host, done))
        # Cancelling would not end the thread that asks the resolver, so the lookup continues.
        await asyncio.wait({lookup}, timeout=self._timeout_s)
        if not lookup.done():
            raise OSError(f"no answer within {self._timeout_s:g} s")
        return lookup.result()

    def _end(self, host: str, lookup: "asyncio.Task[Sequence[Address]]") -> None:
        del self._lookups[host]
        if not lookup.cancelled():
            # Retrieved so that asyncio does not log it: the callers have their answers.
            lookup.exception()


class CheckedTransport(httpx.AsyncBaseTransport):
    """HTTP to allowed addresses only.

    Raises ForbiddenTarget before it sends anything, and the errors of any transport.
    """

    def __init__(self, allowlist: Allowlist, resolve: Resolve) -> None:
        self._allowlist = allowlist
        self._resolve = resolve
        # No connection is kept, because another name may lead to the same address.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._inner = httpx.AsyncHTTPTransport(trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` to the first address of its host that accepts a connection."""
        addresses = await self._addresses(request.url)
        self._allowlist.require(request.url, addresses)
        refused = httpx.ConnectError(f"{request.url.host} has no address", request=request)
        for address in addresses:
            try:
                return await self._inner.handle_async_request(_with_address(address, request))
            except httpx.ConnectError as error:
                refused = error
        raise refused

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _addresses(self, url: httpx.URL) -> Sequence[Address]:
        try:
            return await self._resolve(url.host, url.port or 0)
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(f"{url.host} cannot be looked up: {error}") from error


def _with_address(address: Address, request: httpx.Request) -> httpx.Request:
    url = request.url.copy_with(host=str(address))
    extensions = {**request.extensions, "sni_hostname": request.url.host}
    return httpx.Request(
        request.method, url, headers=request.headers, stream=request.stream, extensions=extensions
    )
