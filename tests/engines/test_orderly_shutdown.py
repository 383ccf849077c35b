"""What has to happen before vLLM's server ends the engine happens before."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest

from proofserve.engines.vllm.compat_client import install_orderly_shutdown

pytestmark = pytest.mark.anyio


class Client:
    """An engine client as far as its end goes, and the order of events."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.client = SimpleNamespace(shutdown=self._shutdown)

    def _shutdown(self, timeout: float | None = None) -> None:
        self.events.append(timeout)

    async def step(self) -> None:
        await asyncio.sleep(0.01)
        self.events.append("step")


async def test_from_another_thread_the_step_comes_first() -> None:
    made = Client()
    install_orderly_shutdown(made.client, made.step, 5.0)
    await asyncio.to_thread(partial(made.client.shutdown, timeout=3))
    assert made.events == ["step", 3]


async def test_a_step_that_hangs_or_fails_does_not_keep_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = Client()

    async def hangs() -> None:
        await asyncio.Event().wait()

    async def fails() -> None:
        raise ValueError("no")

    for step in (hangs, fails):
        client = SimpleNamespace(shutdown=made._shutdown)
        install_orderly_shutdown(client, step, 0.3)
        await asyncio.to_thread(client.shutdown)
    assert made.events == [None, None]
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]


async def test_on_the_loop_itself_nothing_is_waited_for() -> None:
    made = Client()
    install_orderly_shutdown(made.client, made.step, 5.0)
    made.client.shutdown(timeout=1)
    assert made.events == [1]
