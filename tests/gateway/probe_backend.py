"""A backend that answers only probes: real HTTP on loopback, with answers that a test sets."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path


class ProbeBackend:
    """The answers. ``models`` is the body as bytes; an empty one closes the connection."""

    def __init__(self) -> None:
        self.url = ""
        self.health = HTTPStatus.OK
        self.models_status = HTTPStatus.OK
        self.models = listing("tiny")
        self.requests: list[str] = []
        self.news = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.requests.append(head.decode())
                self.news.set()
                answer = self._answer(head.split()[1].decode())
                writer.write(answer)
                await writer.drain()
                if not answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, path: str) -> bytes:
        status = self.health if path == "/health" else self.models_status
        if status is HTTPStatus.IM_A_TEAPOT:
            return b""
        body = self.models if path == "/v1/models" else b""
        return b"HTTP/1.1 %d %s\r\ncontent-length: %d\r\n\r\n%s" % (
            status,
            status.phrase.encode(),
            len(body),
            body,
        )


def listing(*names: str, **more: object) -> bytes:
    """The body of /v1/models."""
    models = [{"id": name, "object": "model", **more} for name in names]
    return json.dumps({"object": "list", "data": models}).encode()


@asynccontextmanager
async def probe_backend(socket: Path | None = None) -> AsyncIterator[ProbeBackend]:
    """A backend that listens until the context ends, on a free port or on ``socket``."""
    one = ProbeBackend()
    if socket is not None:
        server = await asyncio.start_unix_server(one.serve, socket)
        one.url = f"unix:{socket}"
    else:
        server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
        one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield one
    finally:
        server.close()
