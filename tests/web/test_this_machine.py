"""Which requests come from this machine."""

import pytest
from starlette.requests import HTTPConnection

from proofserve.web import is_loopback, why_not_local


def connection(
    client: str | None = "127.0.0.1", server: tuple[str, int | None] | None = None, **headers: str
) -> HTTPConnection:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    peer = None if client is None else (client, 7)
    return HTTPConnection({"type": "http", "client": peer, "server": server, "headers": raw})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_loopback_addresses(host: str) -> None:
    assert is_loopback(host)
    assert why_not_local(connection(host)) is None


@pytest.mark.parametrize("host", ["10.0.0.1", "8.8.8.8", "::", "::ffff:8.8.8.8", "localhost", ""])
def test_other_addresses_and_names(host: str) -> None:
    assert not is_loopback(host)
    assert "another machine" in str(why_not_local(connection(host)))


@pytest.mark.parametrize("name", ["forwarded", "via", "x_real_ip", "x_forwarded_for"])
def test_what_a_proxy_passes_on_is_not_local(name: str) -> None:
    assert "proxy" in str(why_not_local(connection(**{name: "127.0.0.1"})))


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://[", "http://10.0.0.1"])
def test_pages_of_other_sites_are_not_local(origin: str) -> None:
    assert "another site" in str(why_not_local(connection(origin=origin)))


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1", "http://[::1]:8"])
def test_pages_of_this_machine_are_local(origin: str) -> None:
    assert why_not_local(connection(origin=origin)) is None


def test_a_unix_socket_is_local_and_an_unknown_peer_is_not() -> None:
    assert why_not_local(connection(None, ("/run/node.sock", None))) is None
    assert why_not_local(connection(None, ("127.0.0.1", 80))) is not None
    assert why_not_local(connection(None)) is not None
