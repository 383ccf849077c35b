"""An application on a private socket: where it lies, when it answers, and how it ends."""

import asyncio
import signal
import stat
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from proofserve.wiring import sockets
from proofserve.wiring.sockets import on_unix_socket
from support.pace import PACE

pytestmark = pytest.mark.anyio


class Slow:
    """An application whose ``/slow`` never ends by itself, and that notes when it was ended."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.app = FastAPI()
        self.app.get("/")(self._hello)
        self.app.get("/slow")(self._slow)

    async def _hello(self) -> str:
        return "hello"

    async def _slow(self) -> StreamingResponse:
        return StreamingResponse(self._drip())

    async def _drip(self) -> AsyncIterator[bytes]:
        self.started.set()
        try:
            while True:
                yield b"x"
                await asyncio.sleep(0.01)
        finally:
            self.ended.set()


def client(path: Path) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    return httpx.AsyncClient(transport=transport, base_url="http://app", timeout=10.0)


async def test_it_answers_at_once_from_a_folder_of_its_own_and_leaves_nothing() -> None:
    async with on_unix_socket(Slow().app) as path:
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        async with client(path) as http:
            assert (await http.get("/")).json() == "hello"
    assert not path.parent.exists()


async def test_a_socket_in_a_long_place_is_moved_to_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    async with on_unix_socket(Slow().app) as path, client(path) as http:
        assert len(str(path).encode()) <= sockets.SOCKET_PATH
        assert (await http.get("/")).is_success


async def test_signals_stay_with_the_process() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with on_unix_socket(Slow().app):
        after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert after == before


async def test_a_request_that_does_not_end_is_cut_off_within_the_bound() -> None:
    slow = Slow()
    async with on_unix_socket(slow.app, grace_s=1) as path:
        reading = asyncio.create_task(_read_to_the_end(path))
        await slow.started.wait()
        began = time.monotonic()
    assert 1.0 <= time.monotonic() - began < 20.0 * PACE
    assert slow.ended.is_set()
    with pytest.raises(httpx.RemoteProtocolError):
        await reading


async def test_a_client_that_leaves_ends_its_request() -> None:
    slow = Slow()
    async with on_unix_socket(slow.app) as path, client(path) as http:
        async with http.stream("GET", "/slow"):
            await slow.started.wait()
        async with asyncio.timeout(20.0):
            await slow.ended.wait()


async def test_a_socket_that_cannot_be_bound_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SOCKET", "missing/http.sock")
    with pytest.raises(OSError, match="No such file"):
        async with on_unix_socket(Slow().app):
            pytest.fail("the context was entered")


async def _read_to_the_end(path: Path) -> None:
    async with client(path) as http:
        await http.get("/slow")
