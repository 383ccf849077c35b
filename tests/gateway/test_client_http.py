"""HTTP/1.1 and HTTP/1.0 requests byte by byte, and the gateway's answers."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.scripted import END, SSE_HEAD, Backend, Call, answer, backends, chunk, event, sends
from gateway.serving import CHAT, Server, Wire, once, order, plan_for, post, serving, wire
from proofserve.gateway.framing import MAX_HEAD_BYTES, MAX_HEADERS

pytestmark = pytest.mark.anyio

H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: gateway\r\n\r\n"
BROKEN = b"GET /v1/models HTTP/1.1\r\nno header line\r\n\r\n"


async def echo(call: Call) -> None:
    """Answer with the request line, headers and body that arrived."""
    text = {"line": call.line.decode(), "headers": call.headers, "body": call.body.decode()}
    await answer("200 OK", json.dumps(text).encode())(call)


@pytest.fixture(scope="module")
async def running() -> AsyncIterator[tuple[Backend, Server]]:
    async with backends(echo) as (backend,), serving(plan_for(backend)) as server:
        yield backend, server


@pytest.fixture
async def backend(running: tuple[Backend, Server]) -> Backend:
    running[0].script = echo
    running[0].calls.clear()
    return running[0]


@pytest.fixture
async def client(running: tuple[Backend, Server], backend: Backend) -> AsyncIterator[Wire]:
    """A connection to a gateway in front of ``backend``, which echoes requests."""
    async with wire(running[1].port) as client:
        yield client
    await running[1].settled()


CHUNKED_POST = (f"POST {CHAT} HTTP/1.1", "Host: h", "Transfer-Encoding: chunked")


def lines(*each: str, body: bytes = b"") -> bytes:
    """A request of these lines."""
    return "\r\n".join([*each, "", ""]).encode() + body


# -- Upgrade (RFC 9110, section 7.8: a server may ignore it) ---------------------------------------


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_post_with_upgrade_keeps_its_body(
    at_once: bool, client: Wire, backend: Backend
) -> None:
    whole = post(order(), *H2C)
    for part in [whole] if at_once else [whole[:30], whole[30:-20], whole[-20:]]:
        client.send(part)
        await client.writer.drain()
    got = await client.answer()
    assert got.status == 200
    heard = json.loads(got.raw)
    assert heard["body"].encode() == order()
    names = {name for name, _ in heard["headers"]}
    assert names.isdisjoint({"connection", "upgrade", "http2-settings"})
    assert len(backend.calls) == 1


async def test_a_chunked_post_with_upgrade_keeps_its_body(client: Wire) -> None:
    head = lines(f"POST {CHAT} HTTP/1.1", "Host: h", "Transfer-Encoding: chunked", *H2C)
    got = await client.ask(head + chunk(order()) + b"0\r\n\r\n")
    assert json.loads(got.raw)["body"].encode() == order()


async def test_requests_after_an_upgrade_are_answered_in_order(client: Wire) -> None:
    client.send(post(order(user="1"), *H2C) + MODELS + post(order(user="2"), *H2C) + post())
    assert b'\\"1\\"' in (await client.answer()).raw
    assert json.loads((await client.answer()).raw)["object"] == "list"
    assert b'\\"2\\"' in (await client.answer()).raw
    assert (await client.answer()).status == 200


async def test_a_body_after_an_upgrade_is_never_read_as_a_request(client: Wire) -> None:
    got = await client.ask(post(MODELS, *H2C))
    assert (got.status, got.code) == (400, "invalid_body")
    # The next answer belongs to the next request.
    assert json.loads((await client.ask(post())).raw)["line"].startswith("POST")


async def test_the_gateway_treats_a_websocket_request_as_an_ordinary_request(
    client: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: AAAA")
    got = await client.ask(lines("GET /v1/realtime HTTP/1.1", "Host: h", *upgrade))
    assert (got.status, got.code) == (404, "not_found")
    assert "pip install" not in caplog.text


async def test_the_gateway_refuses_connect(client: Wire) -> None:
    got = await client.ask(lines("CONNECT other:443 HTTP/1.1", "Host: other:443"))
    assert (got.status, got.code) == (501, "not_implemented")
    assert await client.ended()


async def test_headers_named_in_connection_are_not_relayed(client: Wire) -> None:
    got = await client.ask(
        post(order(), "Connection: keep-alive, X-Secret", "X-Secret: 1", "X-B: 2")
    )
    names = {name for name, _ in json.loads(got.raw)["headers"]}
    assert "x-secret" not in names
    assert "x-b" in names


async def test_trailer_fields_are_not_relayed_as_headers(client: Wire) -> None:
    head = lines(*CHUNKED_POST)
    got = await client.ask(head + chunk(order()) + b"0\r\nX-Late: 1\r\n\r\n")
    assert "x-late" not in {name for name, _ in json.loads(got.raw)["headers"]}


# -- targets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        f"http://gateway.example:7000{CHAT}?a=b",
        f"HTTPS://gateway.example{CHAT}?a=b",
        "/v1/%63hat/complet%69ons?a=b",
    ],
)
async def test_other_spellings_of_a_relayed_path_are_relayed(target: str, client: Wire) -> None:
    got = await client.ask(post(path=target))
    assert got.status == 200
    assert json.loads(got.raw)["line"] == f"POST {CHAT}?a=b HTTP/1.1"


async def test_an_absolute_target_finds_the_gateways_own_endpoints(client: Wire) -> None:
    for target in ("http://other/v1/health", "http://other:80/v1/health?x", "/v1/he%61lth"):
        got = await client.ask(lines(f"GET {target} HTTP/1.1", "Host: h"))
        assert json.loads(got.raw) == {"status": "ok"}
    assert (await client.ask(lines("GET http://other HTTP/1.1", "Host: h"))).status == 404


async def test_a_path_with_an_encoded_slash_is_another_path(client: Wire, backend: Backend) -> None:
    got = await client.ask(post(path="/v1/chat%2Fcompletions"))
    assert (got.status, got.code) == (404, "not_found")
    assert b"proofserve gateway" not in got.raw
    assert backend.calls == []


# -- HTTP/1.0 --------------------------------------------------------------------------------------

PARTS = [event("one"), event("two"), END]
TEXT = b'data: {"text": "one"}\n\ndata: {"text": "two"}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("extra", [(), ("Connection: keep-alive",)])
async def test_a_stream_to_http_1_0_ends_with_its_connection(
    extra: tuple[str, ...], client: Wire, backend: Backend
) -> None:
    backend.script = sends(SSE_HEAD, *PARTS)
    client.send(post(order(stream=True), *extra).replace(b"HTTP/1.1", b"HTTP/1.0"))
    got = await client.answer()
    assert got.status == 200
    assert got.header("transfer-encoding") is None
    assert got.header("connection") == "close"
    assert got.header("content-type") == "text/event-stream; charset=utf-8"
    assert got.header("x-request-id")
    assert got.raw == TEXT


async def test_a_plain_answer_to_http_1_0_keeps_its_content_length(client: Wire) -> None:
    got = await client.ask(post().replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert got.header("content-length") == str(len(got.raw))
    assert await client.ended()


async def test_a_broken_stream_to_http_1_0_ends_with_an_error_event(
    client: Wire, backend: Backend
) -> None:
    async def breaks(call: Call) -> None:
        await call.send(SSE_HEAD, event("one"))
        await call.close()

    backend.script = breaks
    client.send(post(order(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0"))
    got = await client.answer()
    assert got.last_code == "backend_broke"


async def test_http_1_0_needs_no_host(client: Wire) -> None:
    got = await client.ask(lines("GET /v1/health HTTP/1.0"))
    assert (got.status, got.raw) == (200, b'{"status":"ok"}')
    assert await client.ended()


# -- invalid HTTP ----------------------------------------------------------------------------------


def big(*more: str) -> bytes:
    return post(order(), *more)


REFUSED: list[tuple[str, bytes, int, str]] = [
    ("no Host", post().replace(b"Host: gateway\r\n", b""), 400, "invalid_http"),
    ("two Hosts", post(None, "Host: other"), 400, "invalid_http"),
    ("a coding before chunked", post(b"", "Transfer-Encoding: gzip, chunked"), 400, "invalid_http"),
    (
        "another coding",
        lines(
            f"POST {CHAT} HTTP/1.1",
            "Host: h",
            "Transfer-Encoding: gzip, chunked",
            body=b"0\r\n\r\n",
        ),
        400,
        "invalid_http",
    ),
    (
        "codings on two lines",
        lines(
            f"POST {CHAT} HTTP/1.1",
            "Host: h",
            "Transfer-Encoding: gzip",
            "Transfer-Encoding: chunked",
            body=b"0\r\n\r\n",
        ),
        400,
        "invalid_http",
    ),
    (
        "chunks in HTTP/1.0",
        lines(f"POST {CHAT} HTTP/1.0", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
        400,
        "invalid_http",
    ),
    ("many headers", big(*(f"X-{n}: 1" for n in range(20_000))), 431, "headers_too_large"),
    (
        "a few too many",
        big(*(f"X-{n}: 1" for n in range(MAX_HEADERS - 2))),
        431,
        "headers_too_large",
    ),
    ("a large header", big("X: " + "x" * 200_000), 431, "headers_too_large"),
    ("a larger header", big("X: " + "x" * MAX_HEAD_BYTES), 431, "headers_too_large"),
    ("a large target", post(path=CHAT + "?" + "x" * MAX_HEAD_BYTES), 431, "headers_too_large"),
    ("a head without end", big("X: " + "x" * 2**20)[: 2**20], 431, "headers_too_large"),
    (
        "a trailer without end",
        lines(*CHUNKED_POST, body=b"0\r\nX: " + b"x" * 2**20),
        431,
        "headers_too_large",
    ),
    (
        "a chunk extension without end",
        lines(*CHUNKED_POST, body=b"1;x=" + b"x" * 2**20),
        431,
        "headers_too_large",
    ),
    ("an own endpoint", lines("GET /v1/health HTTP/1.1"), 400, "invalid_http"),
    ("not even a request", b"\x16\x03\x01\x02\x00\x01\x00", 400, "invalid_http"),
    ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_http"),
    ("a broken line", BROKEN, 400, "invalid_http"),
    (
        "a chunk without a size",
        lines(f"POST {CHAT} HTTP/1.1", "Host: h", "Transfer-Encoding: chunked", body=b"zz\r\n"),
        400,
        "invalid_http",
    ),
]


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [row[1:] for row in REFUSED],
    ids=[row[0] for row in REFUSED],
)
async def test_invalid_http_gets_an_openai_error_and_the_connection_closes(
    request_bytes: bytes, status: int, code: str, client: Wire, backend: Backend
) -> None:
    client.send(request_bytes)
    got = await client.answer()
    assert (got.status, got.code) == (status, code)
    assert got.header("content-type") == "application/json"
    assert got.header("connection") == "close"
    assert got.header("x-request-id")
    assert await client.ended()
    assert backend.calls == []


async def test_the_largest_allowed_number_of_headers_passes(client: Wire) -> None:
    got = await client.ask(big(*(f"X-{n}: 1" for n in range(MAX_HEADERS - 3))))
    assert got.status == 200
    got = await client.ask(big("X: " + "x" * (MAX_HEAD_BYTES - 500)))
    assert got.status == 200


async def test_a_large_body_before_the_next_head_does_not_count_as_a_large_head(
    client: Wire,
) -> None:
    client.send(post(order(user="x" * 400_000)) + post(order(user="y" * 400_000)) + post())
    for _ in range(3):
        assert (await client.answer()).status == 200


async def test_requests_before_a_broken_request_are_answered_first(client: Wire) -> None:
    client.send(post() + MODELS + post(order(user="2")) + BROKEN + post())
    for _ in range(3):
        assert (await client.answer()).status == 200
    got = await client.answer()
    assert (got.status, got.code) == (400, "invalid_http")
    assert await client.ended()


async def test_a_broken_body_after_other_requests_is_answered_in_its_turn(
    client: Wire, backend: Backend
) -> None:
    head = lines(f"POST {CHAT} HTTP/1.1", "Host: h", "Transfer-Encoding: chunked")
    client.send(post() + MODELS + head + b"zz\r\n")
    assert (await client.answer()).status == 200
    assert (await client.answer()).status == 200
    got = await client.answer()
    assert (got.status, got.code) == (400, "invalid_http")
    assert await client.ended()
    assert len(backend.calls) == 1


async def test_a_broken_body_of_the_gateways_own_endpoint_is_refused(client: Wire) -> None:
    head = lines("POST /admin/drain HTTP/1.1", "Host: h", "Transfer-Encoding: chunked")
    got = await client.ask(head + b"zz\r\n")
    assert (got.status, got.code) == (400, "invalid_http")
    assert await client.ended()


# -- HEAD, and bodies ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/health", "/v1/health", "/health/ready", "/metrics", "/v1/models", "/admin/backends"]
)
async def test_head_is_get_without_a_body(path: str, client: Wire) -> None:
    got = await client.ask(lines(f"GET {path} HTTP/1.1", "Host: h"))
    client.send(lines(f"HEAD {path} HTTP/1.1", "Host: h") + MODELS)
    status, headers = await client.head()
    assert status == got.status == 200
    assert dict(headers)["content-type"] == got.header("content-type")
    assert "content-length" in dict(headers)
    assert json.loads((await client.answer()).raw)["object"] == "list"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "The request body is empty."),
        (b"{", "The request body is not valid JSON: "),
        (b'{"max_tokens": "many"}', "max_tokens"),
    ],
)
async def test_an_invalid_body_gets_an_error_that_names_the_fault(
    body: bytes, words: str, running: tuple[Backend, Server]
) -> None:
    got = await once(running[1].port, post(body))
    assert (got.status, got.code) == (400, "invalid_body")
    error: dict[str, Any] = json.loads(got.raw)["error"]
    assert words in error["message"]
    assert "meant" not in error["message"]
