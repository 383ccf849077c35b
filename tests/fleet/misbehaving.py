"""Applications around a member's own, which misbehave as networks and broken servers do."""

import asyncio
from collections.abc import Callable
from email.utils import formatdate
from time import time
from typing import Any

App = Callable[..., Any]


class Misbehaving:
    """Passes requests on to ``app``, as long as no fault is switched on."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.hangs = False
        """No request is answered."""
        self.nonsense: bytes | None = None
        """Every request is answered with this."""
        self.loses_answers_of = ""
        """The answer of a POST to a path with this end never arrives; the call is carried out."""
        self.lost = 0
        self.clock_offset_s: float | None = None
        """The server's Date header is so far off; it needs ``Serving.dates`` off."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.hangs:
            await asyncio.sleep(3600)
        if self.nonsense is not None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": self.nonsense})
            return
        path = scope["path"]
        if self.loses_answers_of and path.endswith(self.loses_answers_of):
            await self._app(scope, receive, _nowhere)
            self.lost += 1
            # Without an answer uvicorn would send one itself.
            await asyncio.sleep(3600)
        await self._app(scope, receive, self._dated(send))

    def _dated(self, send: Any) -> Any:
        if self.clock_offset_s is None:
            return send
        date = formatdate(time() + self.clock_offset_s, usegmt=True).encode()

        async def dated(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"date", date)]
            await send(message)

        return dated


async def _nowhere(_message: Any) -> None:
    pass
