"""``Connection: Upgrade`` over real sockets, with both HTTP parsers of uvicorn."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn

from api.support import GENERATE, JOB, START, Server, serving
from proofserve.api.access import Access
from proofserve.wire import PROOFS

pytestmark = pytest.mark.anyio

BODY = json.dumps({**JOB, "wait": True}).encode()
UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
SMUGGLED = f"GET {PROOFS}/versions HTTP/1.1\r\nHost: node\r\n\r\n".encode()


@asynccontextmanager
async def listening(server: Server, parser: str) -> AsyncIterator[int]:
    config = uvicorn.Config(server.app, http=parser, log_level="error", lifespan="off")  # type: ignore[arg-type]
    running = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serve = asyncio.create_task(running.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            running.should_exit = True
            await serve


async def exchange(port: int, *parts: bytes) -> bytes:
    """All bytes of the server until it closes the connection or sends nothing more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.1)
        while chunk := await asyncio.wait_for(reader.read(65536), 1.0):
            answer += chunk
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return answer


def head(path: str, length: int, upgrade: str = UPGRADE) -> bytes:
    lines = f"POST {PROOFS}{path} HTTP/1.1\r\nHost: node\r\n{upgrade}Content-Length: {length}\r\n"
    return f"{lines}Content-Type: application/json\r\n\r\n".encode()


@pytest.mark.parametrize("parser", ["httptools", "h11"])
@pytest.mark.parametrize("apart", [False, True])
async def test_a_body_with_an_upgrade_is_served_or_refused_as_a_whole(
    parser: str, apart: bool
) -> None:
    async with serving() as server, listening(server, parser) as port:
        parts = [head(GENERATE, len(BODY)), BODY]
        answer = await exchange(port, *(parts if apart else [b"".join(parts)]))
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in answer.lower()
        if parser == "h11":
            assert answer.startswith(b"HTTP/1.1 200 ")
        else:
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert b"send it again without Upgrade" in answer


@pytest.mark.parametrize("parser", ["httptools", "h11"])
@pytest.mark.parametrize(
    ("path", "access"),
    [
        (GENERATE, Access(open_to_all=True)),
        ("/stop", Access(open_to_all=True)),
        ("/health/live", Access(open_to_all=True)),
    ],
)
async def test_a_body_is_never_read_as_the_next_request(
    parser: str, path: str, access: Access
) -> None:
    async with serving(access=access) as server, listening(server, parser) as port:
        first = head(path, len(SMUGGLED)).replace(
            b"POST", b"GET" if path.startswith("/health") else b"POST"
        )
        for parts in ((first, SMUGGLED), (first + SMUGGLED,)):
            answer = await exchange(port, *parts)
            assert answer.count(b"HTTP/1.1 ") == 1, parser
            assert b"vllm_version" not in answer


async def test_without_a_body_an_upgrade_is_ignored() -> None:
    async with serving() as server, listening(server, "httptools") as port:
        request = f"GET {PROOFS}/versions HTTP/1.1\r\nHost: node\r\n{UPGRADE}\r\n".encode()
        assert (await exchange(port, request)).startswith(b"HTTP/1.1 200 ")


async def test_an_empty_body_is_named(server: Server) -> None:
    for path in (START, GENERATE, "/init", "/validate"):
        reply = await server.client.post(path)
        assert reply.status_code == 422
        assert reply.json()["detail"] == [
            {"type": "missing", "loc": ["body"], "msg": "The request body is empty."}
        ]
