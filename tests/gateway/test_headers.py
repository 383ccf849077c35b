"""The request and response heads that the gateway relays."""

import httptools
import pytest

from proofserve.gateway.answer import HOP_BY_HOP, CrossOrigin, request_head, response_head

EXPECTED_HOP_BY_HOP = [
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
]


class Seen:
    """A head as a parser reads it."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.complete = True


def request(
    headers: list[tuple[bytes, bytes]],
    own: bytes = b"x-request-id: 7\r\n",
    held_back: frozenset[bytes] = HOP_BY_HOP,
) -> Seen:
    seen = Seen()
    httptools.HttpRequestParser(seen).feed_data(
        request_head(b"/v1/completions?a=b", b"backend:8001", headers, held_back, 0, own)
    )
    assert seen.complete
    return seen


def response(head: bytes, own: bytes = b"", keep_alive: bool = True) -> Seen:
    seen = Seen()
    parser = httptools.HttpResponseParser(seen)
    parser.feed_data(response_head(head, own, keep_alive))
    assert seen.complete
    return seen


def test_a_request_keeps_its_end_to_end_headers() -> None:
    kept = [(b"content-type", b"application/json"), (b"x-mine", b"1"), (b"x-mine", b"2")]
    seen = request(kept)
    assert seen.url == b"/v1/completions?a=b"
    assert seen.headers == [
        (b"host", b"backend:8001"),
        *kept,
        (b"content-length", b"0"),
        (b"x-request-id", b"7"),
    ]


@pytest.mark.parametrize("name", [*EXPECTED_HOP_BY_HOP, b"content-length", b"expect", b"host"])
def test_headers_of_the_clients_connection_are_not_relayed(name: bytes) -> None:
    seen = request([(name, b"the client's")])
    assert b"the client's" not in [value for _, value in seen.headers]


def test_a_chunked_body_gets_a_content_length() -> None:
    head = request_head(
        b"/v1/embeddings", b"b", [(b"transfer-encoding", b"chunked")], HOP_BY_HOP, 12, b""
    )
    assert b"\r\ncontent-length: 12\r\n" in head
    assert b"chunked" not in head


def test_the_gateway_replaces_the_clients_request_id() -> None:
    seen = request([(b"x-request-id", b"theirs")], b"x-request-id: ours\r\n")
    assert [value for name, value in seen.headers if name == b"x-request-id"] == [b"ours"]


OK = b"HTTP/1.1 200 OK\r\nServer: uvicorn\r\nContent-Length: 0"


@pytest.mark.parametrize(
    "line",
    [b"Connection: close", b"KEEP-ALIVE: timeout=5", b"x-REQUEST-id: theirs", b"connection:close"],
)
def test_headers_of_the_backends_connection_are_not_relayed(line: bytes) -> None:
    first = OK.replace(b"\r\n", b"\r\n" + line + b"\r\n", 1)
    last = OK + b"\r\n" + line
    for head in (first, last):
        seen = response(head, b"x-request-id: ours\r\n")
        assert seen.headers == [
            (b"Server", b"uvicorn"),
            (b"Content-Length", b"0"),
            (b"x-request-id", b"ours"),
        ]


def test_headers_with_similar_names_are_relayed() -> None:
    head = OK + b"\r\nX-Connection: a\r\nNo: Connection: b\r\nX-Keep-Alive: c"
    assert response(head).headers[2:] == [
        (b"X-Connection", b"a"),
        (b"No", b"Connection: b"),
        (b"X-Keep-Alive", b"c"),
    ]


def test_the_framing_headers_are_relayed_with_the_body() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked"
    assert (b"transfer-encoding", b"chunked") in response(head).headers


def test_the_response_has_connection_close_if_the_connection_will_close() -> None:
    assert (b"connection", b"close") in response(OK, keep_alive=False).headers
    assert b"connection" not in dict(response(OK).headers)


def test_the_status_line_is_that_of_the_backend() -> None:
    head = response_head(b"HTTP/1.1 418 I'm a teapot\r\na: b", b"", True)
    assert head == b"HTTP/1.1 418 I'm a teapot\r\na: b\r\n\r\n"


def test_every_header_of_an_excluded_name_is_left_out() -> None:
    seen = request([(b"a", b"1"), (b"b", b"2"), (b"a", b"3")], b"", HOP_BY_HOP | {b"a"})
    assert [name for name, _ in seen.headers] == [b"host", b"b", b"content-length"]


def test_without_origins_the_backends_cors_headers_are_relayed() -> None:
    cross = CrossOrigin(())
    head = OK + b"\r\nAccess-Control-Allow-Origin: *"
    assert cross.lines(b"https://a") == b""
    assert cross.strip(head) == head


@pytest.mark.parametrize("origins", [("https://a",), ("*",), ("https://b", "https://a")])
def test_a_listed_page_gets_the_cors_headers(origins: tuple[str, ...]) -> None:
    lines = CrossOrigin(origins).lines(b"https://a")
    assert lines == b"access-control-allow-origin: https://a\r\nvary: Origin\r\n"


@pytest.mark.parametrize("origin", [None, b"https://evil", b"https://a.evil", b"http://a", b""])
def test_a_page_that_is_not_listed_gets_no_cors_headers(origin: bytes | None) -> None:
    assert CrossOrigin(("https://a",)).lines(origin) == b""


def test_with_origins_the_backends_cors_headers_are_removed() -> None:
    head = OK + b"\r\nACCESS-control-Allow-Origin: *\r\nVary: Origin\r\nX-Vary: 1"
    stripped = CrossOrigin(("https://a",)).strip(head)
    assert stripped == OK + b"\r\nX-Vary: 1"
