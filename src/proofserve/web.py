"""What several servers share: who calls, how much, strict JSON, metrics, pages of templates."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from itertools import accumulate
from typing import Annotated, Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from fastapi import Path
from fastapi.routing import APIRoute
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from pydantic_core import from_json
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Message

# Headers that a proxy adds when it passes on the request of another client.
_PROXY_HEADERS = {"forwarded", "via", "x-real-ip"}
# Characters with which a client cannot forge a log line.
_REQUEST_ID = re.compile(rb"[\w.:+/=-]{1,128}", re.ASCII)
_HALF_OF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
MINUTE_S, HOUR_S = 60.0, 3600.0


def why_not_local(connection: HTTPConnection) -> str | None:
    """Why the request may come from another machine; None if it comes from this one.

    The rule for servers without keys: only a loopback address or a unix socket is local, and only
    without a proxy's headers and without a foreign ``Origin``.
    """
    # Behind a proxy every peer is the proxy; a trusted one may even show a local peer address.
    for name in connection.headers:
        if name in _PROXY_HEADERS or name.startswith("x-forwarded-"):
            return f"a proxy passed this request on (header {name})"
    # A browser on this machine also sends requests of pages from other sites.
    for origin in connection.headers.getlist("origin"):
        if not _is_local_page(origin):
            return "a web page of another site sent this request"
    if connection.client is not None:
        is_local = is_loopback(connection.client.host)
    else:
        # A unix socket has a path and no port; its peer may open the socket's file.
        server = connection.scope.get("server")
        is_local = server is not None and server[1] is None
    return None if is_local else "this request comes from another machine"


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a numeric address that only this machine can reach."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def _is_local_page(origin: str) -> bool:
    try:
        host = urlsplit(origin).hostname or ""
    except ValueError:
        return False
    return host == "localhost" or is_loopback(host)


def http_parts(url: str) -> SplitResult | None:
    """The parts of an http or https URL with a host; None for any other text."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if fits else None


def bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key in a request's Authorization header, in the bytes that the client sent.

    Empty, which is the key of no client, if the request has no bearer key or several Authorization
    headers. Names are in lower case.
    """
    return key_of(_only(headers, b"authorization"))


def client_key(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The bearer key of a request, else the ``X-Api-Key`` that Anthropic's clients send."""
    return bearer_key(headers) or _only(headers, b"x-api-key")


def _only(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes:
    found = [value for name, value in headers if name == wanted]
    return found[0] if len(found) == 1 else b""


def key_of(authorization: bytes) -> bytes:
    """The key of an Authorization header (RFC 6750), its scheme in any case; else empty."""
    return authorization[7:].strip() if authorization[:7].lower() == b"bearer " else b""


def digest(key: bytes) -> bytes:
    """What a server keeps of a key: no key stays in memory, and all digests are equally long."""
    return hashlib.blake2b(key).digest()


def request_id_of(given: bytes | None) -> bytes:
    """``given``, the client's id, if it is fit for a log line; else a new id.

    A new id cannot be guessed: the id of an answer is made of it, and opens the answer's receipt.
    """
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return os.urandom(16).hex().encode()


# As long as every id that a client may choose, with what a server adds to it.
ResponseId = Annotated[
    str, Path(max_length=512, description="The `id` of the answer, as chatcmpl-….")
]


class StrictJsonRequest(Request):
    """A request with JSON in UTF-8; NaN and infinities pass, so that an error names the field."""

    async def json(self) -> Any:
        """The parsed body. Raises JSONDecodeError for every fault in it."""
        body = await self.body()
        try:
            return from_json(body)
        except ValueError as error:
            if _HALF_OF_A_PAIR.search(body):
                # Python's parser accepts it; then the model's error names the field.
                with suppress(ValueError, RecursionError):
                    return json.loads(body.decode())
            raise json.JSONDecodeError(str(error), "", 0) from error


async def with_body(request: Request, max_bytes: int, too_large: Exception) -> StrictJsonRequest:
    """``request`` with its body read and kept in it.

    Raises ``too_large`` as soon as the body is known to have more than ``max_bytes`` bytes: from
    its Content-Length, else while it is read. Raises ClientDisconnect.
    """
    announced = request.headers.get("content-length", "")
    # No length that a request could have has more than 19 digits.
    if announced.isdecimal() and (len(announced) > 19 or int(announced) > max_bytes):
        raise too_large
    received = 0

    async def receive() -> Message:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > max_bytes:
            raise too_large
        return message

    bounded = StrictJsonRequest(request.scope, receive)
    await bounded.body()
    return bounded


Handle = Callable[[Request], Coroutine[Any, Any, Response]]


def route_class(around: Callable[[APIRoute, Handle], Handle]) -> type[APIRoute]:
    """A route class whose handlers ``around`` wraps: it checks the client, then reads the body."""

    class CheckedRoute(APIRoute):
        def get_route_handler(self) -> Handle:
            return around(self, super().get_route_handler())

    return CheckedRoute


class FixedWindow:
    """At most ``limit`` units in each window of ``seconds``, from its first use on (ADR 17)."""

    __slots__ = ("_clock", "_seconds", "_used", "end", "limit")

    def __init__(
        self, limit: int, clock: Callable[[], float] = time.monotonic, seconds: float = MINUTE_S
    ) -> None:
        self.limit = limit
        self.end = 0.0
        """When the latest window ends, in seconds of ``clock``."""
        self._clock = clock
        self._seconds = seconds
        self._used = 0

    def take(self, amount: int = 1) -> bool:
        now = self._clock()
        if now >= self.end:
            if amount > self.limit:
                return False
            self._begin(now)
        elif self._used + amount > self.limit:
            return False
        self._count(amount)
        return True

    def charge(self, amount: int) -> None:
        now = self._clock()
        if now >= self.end:
            self._begin(now)
        self._count(amount)

    def give_back(self, amount: int, end: float) -> None:
        """Return an unused ``amount`` that was taken in the window that ends at ``end``."""
        if end == self.end and self._clock() < end:
            self._count(-amount)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.end - self._clock())

    @property
    def left(self) -> int:
        return max(0, self.limit - self._used) if self._clock() < self.end else self.limit

    def _begin(self, now: float) -> None:
        self.end = now + self._seconds
        self._used = 0

    def _count(self, amount: int) -> None:
        self._used += amount


def rendered(package: str, template: str, **values: Any) -> str:
    """The page of a ``template`` among the files of ``package``."""
    # Only what writes pages waits for this import.
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415

    # Prompts, answers, errors and names come from elsewhere and may contain HTML.
    environment = Environment(
        loader=PackageLoader(package, package_path=""), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template(template).render(**values)


Labels = TypeVar("Labels", bound=tuple[str, ...])
# The values of a metric by its labels; a number if it has none.
MetricValues = Mapping[Labels, float] | float


def counter(
    prefix: str, name: str, text: str, values: MetricValues[Labels], *labels: str
) -> Metric:
    return _filled(CounterMetricFamily(f"{prefix}_{name}", text, labels=labels), values)


def gauge(prefix: str, name: str, text: str, values: MetricValues[Labels], *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(f"{prefix}_{name}", text, labels=labels), values)


def histogram(
    prefix: str,
    name: str,
    text: str,
    bounds: Sequence[float],
    values: Mapping[Labels, tuple[Sequence[int], float]],
    *labels: str,
) -> Metric:
    """By labels a count for each of ``bounds`` and a last one for what lies beyond, and the sum."""
    family = HistogramMetricFamily(f"{prefix}_{name}", text, labels=labels)
    names = [*map(str, bounds), "+Inf"]
    for label, (counts, total) in values.items():
        family.add_metric(label, list(zip(names, accumulate(counts), strict=True)), total)
    return family


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, values: MetricValues[Labels]
) -> Metric:
    for label, value in (values if isinstance(values, Mapping) else {(): values}).items():
        family.add_metric(label, value)
    return family
