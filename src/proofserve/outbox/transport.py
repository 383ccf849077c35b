"""Connections of the sender: each name is looked up once, and what was checked is what is dialled.

A check of the URL alone would be worth nothing: whoever owns a name can let it lead anywhere, and
elsewhere a moment later.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address

import httpx

from proofserve.outbox.allowlist import Address, Allowlist

# The addresses of a host, for a port. Raises OSError.
Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]


async def resolve(host: str, port: int) -> Sequence[Address]:
    """The system's answer, in the system's order. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A list and not a set: the order says what to try first.
    return [ip_address(address[0]) for *_, address in found]


class CheckedTransport(httpx.AsyncBaseTransport):
    """HTTP to allowed addresses only.

    Raises ForbiddenTarget, before anything was sent, beside what any transport raises.
    """

    def __init__(self, allowlist: Allowlist, resolve: Resolve) -> None:
        self._allowlist = allowlist
        self._resolve = resolve
        # No connection is kept: it would belong to an address, and so perhaps to another's name.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._inner = httpx.AsyncHTTPTransport(trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` to the first of its host's addresses that takes it."""
        addresses = await self._addresses(request.url)
        self._allowlist.require(request.url, addresses)
        refused = httpx.ConnectError(f"{request.url.host} has no address", request=request)
        for address in addresses:
            try:
                return await self._inner.handle_async_request(_at(address, request))
            except httpx.ConnectError as error:
                refused = error
        raise refused

    async def aclose(self) -> None:
        """Close what is open."""
        await self._inner.aclose()

    async def _addresses(self, url: httpx.URL) -> Sequence[Address]:
        try:
            return await self._resolve(url.host, url.port or 0)
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(f"{url.host} cannot be looked up: {error}") from error


def _at(address: Address, request: httpx.Request) -> httpx.Request:
    """The same request, dialled at ``address``; Host header and certificate stay the name's."""
    url = request.url.copy_with(host=str(address))
    extensions = {**request.extensions, "sni_hostname": request.url.host}
    return httpx.Request(
        request.method, url, headers=request.headers, stream=request.stream, extensions=extensions
    )
