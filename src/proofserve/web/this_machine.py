"""Whether a request comes from this machine: the rule for servers without keys."""

from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

# Headers that a proxy adds when it passes on the request of another client.
_PROXY_HEADERS = {"forwarded", "via", "x-real-ip"}
_PROXY_PREFIX = "x-forwarded-"


def why_not_local(connection: HTTPConnection) -> str | None:
    """Why the request may come from another machine; None if it comes from this one.

    Only a loopback address or a unix socket is local, and only without a proxy's headers and
    without a foreign ``Origin``.
    """
    # Behind a proxy every peer is the proxy; a trusted one may even show a local peer address.
    for name in connection.headers:
        if name in _PROXY_HEADERS or name.startswith(_PROXY_PREFIX):
            return f"a proxy passed this request on (header {name})"
    # A browser on this machine also sends requests of pages from other sites.
    for origin in connection.headers.getlist("origin"):
        if not _is_local_page(origin):
            return "a web page of another site sent this request"
    if not _is_local_peer(connection):
        return "this request comes from another machine"
    return None


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a numeric address that only this machine can reach."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def _is_local_peer(connection: HTTPConnection) -> bool:
    if connection.client is not None:
        return is_loopback(connection.client.host)
    # A unix socket has a path and no port; its peer is a process that may open the socket's file.
    server = connection.scope.get("server")
    return server is not None and server[1] is None


def _is_local_page(origin: str) -> bool:
    try:
        host = urlsplit(origin).hostname or ""
    except ValueError:
        return False
    return host == "localhost" or is_loopback(host)
