"""The real gateway process in front of two backends that always answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from anyio.from_thread import start_blocking_portal

from fuzz.targets import Json, Target
from gateway.scripted import END, MODEL, OK, SSE_HEAD, Backend, Call, backends, event
from proofserve.settings.process import environment
from support.gateway import gateway_process
from support.gateway_requests import CHAT

STREAM = b'"stream":true'


async def answer_all(call: Call) -> None:
    """Answer every request, with a stream where the request asks for one."""
    if STREAM in call.body.replace(b" ", b""):
        await call.send(SSE_HEAD, event("a"), event("b"), END)
    else:
        await call.send(OK)


@contextmanager
def real_gateway(folder: Path) -> Iterator[tuple[Target, list[Backend]]]:
    """A gateway and its backends. The tests drain only the second backend.

    If both were drained, 503 would be the right answer to chat.
    """
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(backends(answer_all, answer_all)) as made,
    ):
        urls = ",".join(backend.url for backend in made)
        with gateway_process(folder, environment({}), backend_url=urls) as server:
            known = {"model": MODEL, "backend": made[1].url}

            def aim(body: Json) -> Json:
                return {**body, **{name: known[name] for name in known.keys() & body.keys()}}

            def work(http: httpx.Client) -> httpx.Response:
                return http.post(CHAT, json={"model": MODEL, "messages": []})

            yield Target(server.url, "^/", server.log.read_text, work, aim), made
