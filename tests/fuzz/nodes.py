"""Nodes for hostile requests: a real one, and our routes with a toy engine in a thread."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from anyio.from_thread import start_blocking_portal

from api.support import ORDER as TOY_ORDER
from api.support import serving
from fuzz.targets import Json, Target
from support.node import ROUND, serve

POW = "/api/v1/pow"


@contextmanager
def real_node(model: Path, folder: Path) -> Iterator[Target]:
    """A vLLM with the plugin. The limit of requests per minute is raised for the tests."""
    with serve(model, folder, POC_REQUESTS_PER_MINUTE="1000000") as served:
        yield _target(served.server.url, served.server.log.read_text, ROUND)


@contextmanager
def toy_node(log: Callable[[], str]) -> Iterator[Target]:
    """The same routes over HTTP, with an engine that computes almost nothing."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(_toy()) as url:
        yield _target(url, log, {**TOY_ORDER, "node_id": 0, "node_count": 1})


@asynccontextmanager
async def _toy() -> AsyncIterator[str]:
    async with serving(max_nonces=100_000) as toy:
        toy.app.add_api_route("/health", lambda: {"status": "ok"})
        config = uvicorn.Config(toy.app, lifespan="off", ws="none", log_config=None)
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            # A client that connects before the server is ready waits in the socket's backlog.
            running = asyncio.create_task(server.serve(sockets=[listening]))
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            server.should_exit = True
            await running


def _target(url: str, log: Callable[[], str], order: Json) -> Target:
    known = {
        **order,
        "seq_len": order["params"]["seq_len"],
        "scheme": "artifact-v1",
        "poc_stronger_rng": False,
        "url": None,
        "callback_url": None,
    }

    def aim(body: Json) -> Json:
        aimed = {**body, **{name: known[name] for name in known.keys() & body.keys()}}
        nonces = aimed.get("nonces")
        if nonces:
            nonces = aimed["nonces"] = list(dict.fromkeys(nonces))[:64]
            if "dist" in body:
                aimed["dist"] = [*body["dist"], *[1.0] * 64][: len(nonces)]
            if body.get("validation"):
                claims = [{"nonce": nonce, "vector_b64": "A" * 32} for nonce in nonces]
                aimed["validation"] = {"artifacts": claims}
        return aimed

    def work(http: httpx.Client) -> httpx.Response:
        _stop(http)
        body = {**order, "nonces": [1, 2, 3], "wait": True}
        return http.post(f"{POW}/generate", json=body)

    return Target(url, f"^{POW}/", log, work, aim, before=_stop_before_a_wait)


def _stop_before_a_wait(http: httpx.Client, body: Any) -> None:
    """Stop the round before a job with ``wait``: such a job waits until the round ends."""
    if isinstance(body, dict) and body.get("wait") is True:
        _stop(http)


def _stop(http: httpx.Client) -> None:
    http.post(f"{POW}/stop").raise_for_status()
