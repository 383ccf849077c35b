"""vLLM's own application with its engine's client in this process, served on a unix socket.

One engine serves the file. That it goes down in an orderly way is checked where it does: in the
fixture, after the last test.
"""

import asyncio
import json
import logging
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from proofserve.engines.vllm.inprocess import vllm_app
from proofserve.wiring.sockets import on_unix_socket
from support.gateway import ROOM
from support.node import DTYPE, IN_ONE_PROCESS, NAME, ROUND
from support.pace import until

pytestmark = pytest.mark.engine

OPTIONS = [
    *("--served-model-name", NAME),
    *ROOM,
    *("--dtype", DTYPE),
    "--enforce-eager",
    *IN_ONE_PROCESS,
    # No socket listens there; without a key the proof endpoints refuse other machines' addresses.
    *("--host", "127.0.0.1"),
]


class EmbeddedApp:
    """The application, its socket and a client, all on one event loop."""

    def __init__(self, model: Path) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self.before = of_the_process()
        self.http: httpx.AsyncClient = self.run(self._start(model))

    async def _start(self, model: Path) -> httpx.AsyncClient:
        app = await self._stack.enter_async_context(vllm_app(str(model), OPTIONS))
        path = await self._stack.enter_async_context(on_unix_socket(app))
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        return await self._stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://app", timeout=60.0)
        )

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(coroutine)

    def close(self) -> set[str]:
        """Leave the contexts; what still runs of the proof node then, by name."""
        left: set[str] = self.run(self._stop())
        self._runner.close()
        return left

    async def _stop(self) -> set[str]:
        await self._stack.aclose()
        names = [task.get_name() for task in asyncio.all_tasks()]
        names += [thread.name for thread in threading.enumerate()]
        return {name for name in names if name.startswith(("proofserve", "outbox"))}

    async def running(self) -> float:
        """Requests that the engine works on, by vLLM's own count."""
        text = (await self.http.get("/metrics")).raise_for_status().text
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        return float(lines[0].split()[-1])


def of_the_process() -> list[object]:
    """Signal handlers and log level: they belong to the application that embeds the engine."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)
    return [logging.root.level, *map(signal.getsignal, numbers)]


def engine_processes() -> set[psutil.Process]:
    """Everything this process started, but for Python's own tracker, which lives as long as it."""
    return {
        child
        for child in psutil.Process().children(recursive=True)
        if not any("resource_tracker" in word for word in command(child))
    }


def command(child: psutil.Process) -> list[str]:
    """The command line of a process; empty for one that has ended."""
    try:
        return child.cmdline()
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(scope="module")
def embedded(
    tiny: Path, cpu_environment: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedApp]:
    outbox = tmp_path_factory.mktemp("embedded") / "outbox.sqlite"
    for name, value in {
        "VLLM_PLUGINS": "proofserve",
        "POC_ENABLED": "1",
        "POC_OUTBOX": str(outbox),
        # vLLM would set it for the rest of the process.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }.items():
        cpu_environment.setenv(name, value)
    before = engine_processes()
    running = EmbeddedApp(tiny)
    family = engine_processes() - before
    assert family
    yield running
    assert running.close() == set()
    # vLLM waits a moment, kills what is left, and does not look back.
    _, alive = psutil.wait_procs(family | (engine_processes() - before), timeout=30.0)
    assert alive == []


def chat(tokens: int = 8, **changes: Any) -> dict[str, Any]:
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": "Tell me about rivers."}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **changes,
    }


def test_it_is_healthy_and_names_its_model(embedded: EmbeddedApp) -> None:
    assert embedded.run(embedded.http.get("/health")).status_code == 200
    models = embedded.run(embedded.http.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == [NAME]


def test_signals_and_logging_stay_with_the_process(embedded: EmbeddedApp) -> None:
    assert of_the_process() == embedded.before


def test_a_stream_says_what_the_plain_answer_says(embedded: EmbeddedApp) -> None:
    async def scenario() -> tuple[str, str]:
        plain = (await embedded.http.post("/v1/chat/completions", json=chat())).raise_for_status()
        deltas = []
        async with embedded.http.stream(
            "POST", "/v1/chat/completions", json=chat(stream=True)
        ) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = [line async for line in stream.aiter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        for line in lines:
            deltas.append(json.loads(line.removeprefix("data: "))["choices"][0]["delta"])
        streamed = "".join(delta.get("content") or "" for delta in deltas)
        return plain.json()["choices"][0]["message"]["content"], streamed

    plain, streamed = embedded.run(scenario())
    assert plain
    assert streamed == plain


def test_an_unknown_model_is_refused_in_vllms_own_words(embedded: EmbeddedApp) -> None:
    response = embedded.run(embedded.http.post("/v1/chat/completions", json=chat(model="another")))
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "NotFoundError"


def test_proofs_are_served_beside_chat(embedded: EmbeddedApp) -> None:
    async def scenario() -> Any:
        body = {**ROUND, "nonces": [0, 1, 2], "wait": True}
        proved, _ = await asyncio.gather(
            embedded.http.post("/api/v1/pow/generate", json=body),
            embedded.http.post("/v1/chat/completions", json=chat()),
        )
        return proved.raise_for_status().json()

    proved = embedded.run(scenario())
    assert [artifact["nonce"] for artifact in proved["artifacts"]] == [0, 1, 2]
    status = embedded.run(embedded.http.get("/api/v1/pow/status")).json()
    assert status["engine"]["forwards"] >= 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine(embedded: EmbeddedApp, stream: bool) -> None:
    async def busy() -> bool:
        return await embedded.running() == 1

    async def idle() -> bool:
        return await embedded.running() == 0

    async def scenario() -> None:
        request = asyncio.create_task(
            embedded.http.post("/v1/chat/completions", json=chat(tokens=15_000, stream=stream))
        )
        await until(busy, 10.0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await until(idle, 10.0)

    embedded.run(scenario())


def test_an_option_that_vllm_does_not_know_ends_as_on_its_command_line(
    embedded: EmbeddedApp, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        with pytest.raises(SystemExit):
            async with vllm_app(str(tiny), ["--no-such-option"]):
                pytest.fail("the context was entered")

    embedded.run(scenario())
    assert "--no-such-option" in capsys.readouterr().err
