"""How a gateway's process ends after a terminal's interrupt, a crash or a failed start."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from proofserve.settings.process import environment
from support.gateway import END_S, Users, embedded, gateway_process, until
from support.gateway_requests import chat

pytestmark = [pytest.mark.engine, pytest.mark.anyio]


def ending(**variables: str) -> "subprocess.CompletedProcess[str]":
    """A gateway that should not start."""
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **variables}
    command = [sys.executable, "-m", "proofserve", "gateway"]
    return subprocess.run(
        command, env=environment(env), capture_output=True, text=True, timeout=END_S, check=False
    )


def test_an_engine_that_does_not_start_is_a_failure_of_the_gateway(tiny: Path) -> None:
    ended = ending(
        VLLM_USE_EMBEDDED_ENGINE="true", VLLM_MODEL=str(tiny), VLLM_ENGINE_OPTIONS="--no-such"
    )
    assert ended.returncode == 3
    assert "unrecognized arguments: --no-such" in ended.stderr


def test_a_taken_port_is_a_failure_of_the_gateway() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = ending(VLLM_HOST="127.0.0.1", VLLM_PORT=str(port))
    assert ended.returncode == 3
    assert "Address already in use" in ended.stderr


def test_a_gateway_without_its_backends_starts_and_ends_well(tmp_path: Path) -> None:
    env = environment({})
    with gateway_process(tmp_path, env, backend_url="http://127.0.0.1:9") as server:
        server.process.terminate()
        assert server.process.wait(END_S) == 0


@pytest.mark.slow
async def test_an_interrupt_at_a_terminal_lets_answers_finish(tiny: Path, tmp_path: Path) -> None:
    with embedded(tiny, tmp_path) as served:
        async with Users(served.url) as users:
            asked = [chat(400, about=i, stream=True) for i in range(20)]
            answers = [asyncio.create_task(users.ask(body)) for body in asked]

            async def running() -> bool:
                return await users.metrics("vllm:num_requests_running") == (20,)

            await until(running, 20.0)
            # A terminal tells the engine's processes too.
            os.killpg(served.server.process.pid, signal.SIGINT)
            assert all(reply.finished for reply in await asyncio.gather(*answers))
        assert await asyncio.to_thread(served.server.process.wait, END_S) == 0


@pytest.mark.slow
async def test_a_dead_engine_shows_and_then_ends_its_gateway(tiny: Path, tmp_path: Path) -> None:
    with embedded(tiny, tmp_path) as served:
        (core,) = (child for child in served.children() if "EngineCore" in child.name())
        core.kill()

        async def not_ready() -> bool:
            return (await asyncio.to_thread(served.get, "/health/ready")).status_code == 503

        await until(not_ready, 10.0)
        assert await asyncio.to_thread(served.server.process.wait, END_S) == 3
