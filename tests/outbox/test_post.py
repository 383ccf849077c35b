import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from proofserve.outbox.planning import Delivery
from proofserve.outbox.sender import Outward, new_client, post

from .support import Target

pytestmark = pytest.mark.anyio


async def _post(url: str, timeout_s: float = 5.0, body: bytes = b'{"n_total":3}') -> str | None:
    outward = Outward()
    delivery = Delivery(1, "validated", url, "k3y", 9, 0, None)
    async with new_client(outward) as client:
        return await post(client, outward, delivery, body, timeout_s)


async def test_the_request_is_as_documented(target: Target) -> None:
    assert await _post(f"{target.url}/base") is None
    (only,) = target.arrivals
    assert (only.path, only.body) == ("/base/validated", {"n_total": 3})
    assert (only.key, only.sequence) == ("k3y", 9)
    assert only.headers["content-type"] == "application/json"
    assert only.headers["content-length"] == "13"


@pytest.mark.parametrize("status", [200, 202, 204, 299])
async def test_a_2xx_status_acknowledges(target: Target, status: int) -> None:
    target.answer = lambda _arrival: status
    assert await _post(target.url) is None
    assert len(target.arrivals) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_a_failure_that_names_its_target(target: Target, status: int) -> None:
    target.answer = lambda _arrival: status
    target.location = "/moved/validated"
    assert await _post(target.url) == (
        f"HTTP {status}: redirects to {target.url}/moved/validated; redirects are not followed:"
        f" configure {target.url}/moved as the callback URL"
    )
    assert len(target.arrivals) == 1


async def test_a_redirect_to_another_host_names_that_host(target: Target) -> None:
    target.answer = lambda _arrival: 308
    target.location = "https://validator.example/hooks"
    error = await _post(target.url)
    assert error is not None
    assert "configure https://validator.example/hooks as the callback URL" in error


@pytest.mark.parametrize("status", [300, 304, 399])
async def test_a_3xx_status_without_a_redirect_is_a_failure(target: Target, status: int) -> None:
    target.answer = lambda _arrival: status
    error = await _post(target.url)
    assert error is not None
    assert error.startswith(f"HTTP {status}: ")


@pytest.mark.parametrize("status", [400, 422, 500, 503])
async def test_any_other_status_is_an_error_with_its_text(target: Target, status: int) -> None:
    target.answer = lambda _arrival: status
    assert await _post(target.url) == f"HTTP {status}: so says the target"


@pytest.mark.parametrize("url", ["not a url", "http://[", "ftp://host", "http://\n"])
async def test_an_impossible_url_is_an_ordinary_error(url: str) -> None:
    assert await _post(url)


async def test_a_target_that_does_not_answer_runs_into_the_timeout(target: Target) -> None:
    target.delay_s = 0.3
    assert await _post(target.url, 0.1) == "no answer within 0.1 s"


async def test_a_large_body_gets_more_time(target: Target) -> None:
    target.delay_s = 0.3
    assert await _post(target.url, 0.1, b'"' + b"x" * 3_000_000 + b'"') is None


Talk = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def _talker(talk: Talk) -> AsyncIterator[str]:
    """A target that answers one connection with raw bytes."""
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            await talk(writer)
        with suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await ended.wait()


async def test_an_answer_that_arrives_too_slowly_is_an_error() -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        for byte in b"HTTP/1.1 200 OK\r\n":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)

    async with _talker(drip) as url:
        assert await _post(url, 0.2) == "no answer within 0.2 s"


async def test_after_a_2xx_status_the_body_does_not_matter() -> None:
    answered = asyncio.Event()

    async def stall(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        await writer.drain()
        await answered.wait()

    async with _talker(stall) as url:
        assert await _post(url, 5.0) is None
        answered.set()


async def test_the_sender_reads_only_the_beginning_of_an_endless_refusal() -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 No\r\n\r\n")
        while True:
            writer.write(b"no " * 1000)
            await writer.drain()
            await asyncio.sleep(0)

    async with _talker(endless) as url:
        error = await _post(url)
        assert error is not None
        assert error.startswith("HTTP 500: no no no")
        assert len(error) < 400


async def test_a_connection_that_breaks_is_an_error() -> None:
    async def leave(_writer: asyncio.StreamWriter) -> None:
        return

    async with _talker(leave) as url:
        error = await _post(url)
        assert error is not None
        assert error.startswith(("RemoteProtocolError", "ReadError"))
