"""Pins what gateway/protocol and wiring/gateway rely on in uvicorn and httptools.

A failure here after an upgrade says which of them to look at.
"""

import asyncio
import inspect
import signal
from collections import deque

import httptools
import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from support.contract import parameters


async def _app(scope: object, receive: object, send: object) -> None:
    """Never called."""


@pytest.fixture
async def protocol() -> HttpToolsProtocol:
    config = uvicorn.Config(_app, http=HttpToolsProtocol, ws="none", log_config=None)
    return HttpToolsProtocol(config, ServerState(), {"gateway": 7})


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("__init__", ["self", "config", "server_state", "app_state", "_loop"]),
        ("on_message_begin", ["self"]),
        ("on_url", ["self", "url"]),
        ("on_header", ["self", "name", "value"]),
        ("on_headers_complete", ["self"]),
        ("on_body", ["self", "body"]),
        ("on_message_complete", ["self"]),
        ("on_response_complete", ["self"]),
        ("_start_asgi_task", ["self", "cycle", "app"]),
        ("_unset_keepalive_if_required", ["self"]),
        ("data_received", ["self", "data"]),
        ("pause_writing", ["self"]),
        ("resume_writing", ["self"]),
        ("connection_lost", ["self", "exc"]),
        ("shutdown", ["self"]),
    ],
)
def test_what_the_protocol_overrides_and_calls(name: str, takes: list[str]) -> None:
    assert parameters(getattr(HttpToolsProtocol, name)) == takes


@pytest.mark.anyio
async def test_what_the_protocol_reads_of_itself(protocol: HttpToolsProtocol) -> None:
    assert protocol.cycle is None
    assert protocol.pipeline == deque()
    assert protocol.expect_100_continue is False
    assert protocol.app is protocol.config.loaded_app
    assert protocol.loop is asyncio.get_running_loop()
    for late in ("flow", "transport", "headers"):
        assert getattr(protocol, late) is None
    assert protocol.app_state == {"gateway": 7}
    for needed in ("should_keep_alive", "get_method"):
        assert callable(getattr(protocol.parser, needed))


@pytest.mark.anyio
async def test_names_of_headers_come_in_lower_case_and_the_url_as_it_was_sent(
    protocol: HttpToolsProtocol,
) -> None:
    protocol.on_message_begin()
    protocol.on_url(b"/v1/completions")
    protocol.on_url(b"?a=b")
    protocol.on_header(b"X-Request-ID", b"Mine")
    protocol.on_header(b"Expect", b"100-Continue")
    assert protocol.url == b"/v1/completions?a=b"
    assert protocol.headers == [(b"x-request-id", b"Mine"), (b"expect", b"100-Continue")]
    assert protocol.expect_100_continue


def test_what_follows_an_answer_when_nothing_is_pipelined() -> None:
    # The protocol does the same, but for the timer.
    lines = inspect.getsource(HttpToolsProtocol.on_response_complete)
    done = [line.strip() for line in lines.splitlines()[1:] if "#" not in line and line.strip()]
    assert done[:5] == [
        "self.server_state.total_requests += 1",
        "if self.transport.is_closing():",
        "return",
        "self._unset_keepalive_if_required()",
        "self.flow.resume_reading()",
    ]
    assert "self.timeout_keep_alive, self.timeout_keep_alive_handler" in lines


class Parsed:
    """What the parser reports of requests."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.seen: list[object] = []
        self.error: Exception | None = None

    def on_headers_complete(self) -> None:
        self.seen.append(self.parser.should_upgrade())
        if self.error is not None:
            raise self.error

    def on_body(self, body: bytes) -> None:
        self.seen.append(body)

    def on_message_complete(self) -> None:
        self.seen.append("complete")


def test_a_request_with_upgrade_ends_at_its_head_for_the_parser() -> None:
    parsed = Parsed()
    head = b"POST / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\nContent-Length: 2\r\n\r\n"
    with pytest.raises(httptools.HttpParserUpgrade) as caught:
        parsed.parser.feed_data(head + b"ab")
    assert caught.value.args == (len(head),)
    assert parsed.seen == [True, "complete"]


def test_an_error_of_a_callback_is_the_context_of_the_parsers() -> None:
    parsed = Parsed()
    parsed.error = KeyError("ours")
    with pytest.raises(httptools.HttpParserCallbackError) as caught:
        parsed.parser.feed_data(b"GET / HTTP/1.1\r\n\r\n")
    assert caught.value.__context__ is parsed.error


def test_a_response_to_http_1_0_is_written_to_the_cycles_transport() -> None:
    source = inspect.getsource(RequestResponseCycle)
    assert "self.transport.write(" in source
    assert "self.transport.close()" in source


def test_flow_control() -> None:
    for name in ("pause_reading", "resume_reading", "pause_writing", "resume_writing"):
        assert parameters(getattr(FlowControl, name)) == ["self"]
    assert "write_paused" in inspect.getsource(FlowControl.__init__)


def test_what_uvicorn_reads_and_writes_of_a_cycle() -> None:
    # An Exchange replaces a cycle: it has these names, or the protocol never reads them.
    source = inspect.getsource(HttpToolsProtocol)
    names = {
        line.split(owner)[1].split()[0].strip(":,()").split("(")[0]
        for line in source.splitlines()
        for owner in ("self.cycle.", "existing_cycle.")
        if owner in line
    }
    names = {name.split(".")[0] for name in names}
    assert names == {
        "body",
        "disconnected",
        "keep_alive",
        "message_event",
        "more_body",
        "response_complete",
    }


def test_the_next_of_a_pipeline_is_popped_from_the_right() -> None:
    source = inspect.getsource(HttpToolsProtocol)
    assert "self.pipeline.appendleft((self.cycle, app))" in source
    assert "cycle, app = self.pipeline.pop()" in source
    assert "self._start_asgi_task(cycle, app)" in source


def test_a_server_raises_at_its_end_the_signals_that_it_captured() -> None:
    raised: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: raised.append(number))
    try:
        server = uvicorn.Server(uvicorn.Config(_app, log_config=None))
        with server.capture_signals():
            signal.raise_signal(signal.SIGTERM)
            assert server._captured_signals == [signal.SIGTERM]
            assert server.should_exit
            assert raised == []
    finally:
        signal.signal(signal.SIGTERM, before)
    assert raised == [signal.SIGTERM]


def test_a_server_shares_the_state_of_its_lifespan() -> None:
    assert "self.lifespan.state" in inspect.getsource(uvicorn.Server)
    assert "app_state" in inspect.getsource(uvicorn.Server)
