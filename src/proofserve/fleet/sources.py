"""Where members come from without joining by themselves: a list, and a name in the DNS."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from proofserve.fleet.records import MemberSource
from proofserve.web import http_parts

_logger = logging.getLogger(__name__)

# How often the name is looked up, and how long one look-up may take. Seconds.
LOOKUP_EVERY_S = 30.0
_LOOKUP_S = 10.0
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a member is; ``key`` is its own API key, None for the fleet's key for members."""

    name: str
    url: str
    source: MemberSource
    key: str | None = field(default=None, repr=False)


def address(url: str, name: str | None, source: MemberSource, key: str | None = None) -> Address:
    """An address with a name made of ``url`` if it has none. Raises ValueError for a bad URL."""
    plain = plain_url(url)
    return Address(name or urlsplit(plain).netloc, plain, source, key)


def plain_url(url: str) -> str:
    """``url`` without a slash at its end. Raises ValueError unless it is http(s)://host[:port]."""
    if (parts := http_parts(url.strip())) is None:
        raise ValueError(f"{url[:200]!r} is not a URL like http://host:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("the URL of a member has no user name, query or fragment")
    if parts.path.strip("/"):
        raise ValueError("the URL of a member has no path: the fleet adds /api/v1/pow itself")
    return f"{parts.scheme}://{parts.netloc.lower()}"


class DnsMembers:
    """The members at the addresses of the host in ``url``, such as a headless service.

    ``clock`` gives monotonic seconds.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = urlsplit(plain_url(url))
        self._host = self._parts.hostname or ""
        self._clock = clock
        self._looked_up_at: float | None = None
        self._found: Sequence[Address] | None = None

    async def addresses(self) -> Sequence[Address] | None:
        """The addresses by the newest look-up, which is at most ``LOOKUP_EVERY_S`` old.

        None if it failed.
        """
        now = self._clock()
        if self._looked_up_at is None or now - self._looked_up_at >= LOOKUP_EVERY_S:
            self._looked_up_at = now
            try:
                self._found = await self._look_up()
            except OSError as error:
                self._found = None
                _logger.warning("%s cannot be looked up: %s", self._host, error)
        return self._found

    async def _look_up(self) -> Sequence[Address]:
        """Raises OSError."""
        port = self._parts.port or _PORTS[self._parts.scheme]
        lookup = asyncio.get_running_loop().getaddrinfo(self._host, port, type=socket.SOCK_STREAM)
        try:
            async with asyncio.timeout(_LOOKUP_S):
                found = await lookup
        except TimeoutError:
            raise OSError(f"no answer of the DNS within {_LOOKUP_S:g} s") from None
        except UnicodeError as error:
            raise OSError(f"it is not a name of the DNS: {error}") from None
        hosts = sorted({str(each[4][0]) for each in found})
        places = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
        urls = [(each, f"{self._parts.scheme}://{each}") for each in places]
        return tuple(Address(*each, MemberSource.DNS) for each in urls)
