"""A client of a server that may be no node, or hostile."""

import time
from collections.abc import Iterator

import httpx
import pytest

from proofserve.remote import http
from proofserve.remote.http import JsonClient
from proofserve.reports import NodeError, ReportedError
from support.odd_server import odd_server

NO_URLS = ("", "node:8000", "127.0.0.1:8000", "ftp://node", "http://", "http://node:99999")


@pytest.mark.parametrize("url", NO_URLS)
def test_a_url_of_no_server_is_refused_before_it_is_called(url: str) -> None:
    with pytest.raises(ReportedError, match=r"no URL of a server|Invalid"):
        JsonClient(url)


def test_an_endless_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LONGEST_ANSWER", 2**20)
    with (
        odd_server(b" " * 2**16, endless=True) as url,
        JsonClient(url) as client,
        pytest.raises(NodeError, match=r"GET .*/x: more than 1048576 bytes"),
    ):
        client.ask("GET", "/x")


def test_an_answer_that_drips_is_not_waited_for() -> None:
    class Drips(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            while True:
                yield b" "
                time.sleep(0.01)

    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Drips()))
    with (
        JsonClient("http://node", timeout_s=0.1, transport=transport) as client,
        pytest.raises(NodeError, match=r"did not end within 0\.1 s"),
    ):
        client.ask("GET", "/x")


def test_a_web_page_is_named_and_not_shown() -> None:
    page = httpx.Response(404, html="<!DOCTYPE html><p>Not here</p>")
    transport = httpx.MockTransport(lambda _: page)
    with JsonClient("http://shop", transport=transport) as shop, pytest.raises(NodeError) as caught:
        shop.ask("GET", "/v1/models")
    assert str(caught.value) == "GET http://shop/v1/models: 404 and a web page"
