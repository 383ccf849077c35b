"""The page of a gateway under load in a real browser: two stub backends, two keys."""

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from dashboard.looking import expect, expect_unanswered, fits, is_accessible, live, picture, state
from dashboard.serving import PageServer
from proofserve.gateway.app import build
from proofserve.gateway.dashboard import LoadHistory
from proofserve.gateway.protocol import GatewayProtocol
from proofserve.gateway.records import BackendSpec, ClientSpec, GatewayPlan
from support.browser import tab

if TYPE_CHECKING:
    from playwright.sync_api import Browser

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":31,"completion_tokens":96}}\n\n'
KEYS = {"research": 12, "support": 6, "batch": 4}


def stub() -> FastAPI:
    """A backend that takes a second for an answer."""
    app = FastAPI()

    async def words() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield b'data: {"choices":[]}\n\n'
            await asyncio.sleep(0.1)
        yield USAGE + b"data: [DONE]\n\n"

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "Qwen/Qwen3-32B"}]}

    @app.post("/v1/chat/completions")
    async def chat(_: Request) -> StreamingResponse:
        return StreamingResponse(words(), media_type="text/event-stream")

    return app


@pytest.fixture
def gateway() -> Iterator[PageServer]:
    with ExitStack() as stack:
        urls = [stack.enter_context(PageServer(stub).running()).url for _ in range(2)]
        plan = GatewayPlan(
            backends=(BackendSpec(urls[0]), BackendSpec(urls[1], 2.0)),
            clients=tuple(
                ClientSpec(name=name, key=name, concurrency=3 if name == "batch" else None)
                for name in KEYS
            ),
            max_concurrent=14,
            queue_limit=40,
            dashboard=True,
        )
        server = PageServer(lambda: build(plan), http=GatewayProtocol)
        with server.running():
            yield server


@contextmanager
def load(url: str) -> Iterator[None]:
    """Chat with all keys until the context ends, one more of ``batch`` than its limit."""
    over = threading.Event()
    body = {"model": "Qwen/Qwen3-32B", "stream": True, "messages": []}

    def client(key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
            while not over.is_set():
                answer = http.post("/v1/chat/completions", json=body)
                time.sleep(0.5 if answer.is_error else 0.0)

    threads = [
        threading.Thread(target=client, args=(key,))
        for key, count in KEYS.items()
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def give_past(history: LoadHistory) -> None:
    """Twenty minutes of load in a moment: the past of the charts is made up, the rest is real."""
    draw = Random(2)
    now = {name: getattr(history, name).trend().values[-1] for name in _PAST}
    backends = {name: kept.trend().values[-1] for name, kept in history._backends.items()}
    for name in _PAST:
        getattr(history, name)._values.clear()
    for step in range(240):
        part = min(1.0, 0.35 + step / 240) * draw.uniform(0.88, 1.06)
        for name in _PAST:
            value = now[name] * (part if name != "queued" else max(0.0, part - 0.7) * 3.3)
            whole = name in ("in_flight", "queued")
            getattr(history, name).add(min(14, round(value)) if whole else value)
        for name, kept in history._backends.items():
            kept.add(backends[name] * part)


_PAST = ("in_flight", "queued", "requests", "errors", "tokens")


def history_of(gateway: PageServer) -> LoadHistory:
    feed = gateway.state["dashboard"]
    history: LoadHistory = feed.read.args[1]
    return history


def test_a_gateway_under_load(browser: "Browser", gateway: PageServer) -> None:
    history = history_of(gateway)
    with load(gateway.url), tab(browser, f"{gateway.url}/dashboard") as opened:
        page = opened.page
        live(page)
        expect(page.locator("#members-title")).to_have_text("Backends")
        expect(page.locator(".figure", has_text="In flight").locator("b")).to_have_text("14")
        # As the watch does every five seconds, of which this test does not wait for two.
        loop = gateway.state["gateway"].loop
        for _ in range(2):
            loop.call_soon_threadsafe(history.look)
            time.sleep(1.5)
        give_past(history)
        expect(page.locator("#keys tbody tr")).to_have_count(len(KEYS))
        expect(page.locator("#keys tbody")).to_contain_text("concurrency_limit")
        for panel in ("#round", "#jobs", "#distances"):
            expect(page.locator(panel)).to_be_hidden()
        expect(page.locator("#load .readout")).to_contain_text("in flight 14")
        # The page forbids to make code of a text, with which wait_for_function would wait.
        expect(page.locator(".figure .spark .line").first).to_have_attribute(
            "d", re.compile(r".{300}", re.DOTALL)
        )
        is_accessible(page)
        picture(page, "dashboard-gateway")
        page.set_viewport_size({"width": 360, "height": 740})
        fits(page)
        page.set_viewport_size({"width": 1280, "height": 900})
        # Drain a backend from its details.
        page.locator("#member-table .name").first.click()
        page.locator("#member-dialog").get_by_role("button", name="Drain").click()
        dialog = page.locator("#action-dialog")
        expect(dialog).to_contain_text("gets no new requests")
        dialog.get_by_role("button", name="Drain").click()
        expect(dialog).to_be_hidden()
        expect(page.locator("#member-dialog .badge")).to_contain_text("drained")
        page.keyboard.press("Escape")
        # The worst come first, and an idle backend is not well.
        expect(state(page, 0)).to_contain_text("drained")
        expect_unanswered(opened)
