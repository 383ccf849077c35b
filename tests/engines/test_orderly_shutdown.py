"""When vLLM's server ends the engine: proofs stop before it, open requests end with it."""

import asyncio
import time
from functools import partial
from types import SimpleNamespace

import pytest

from proofserve.engines.vllm.compat_client import ServerStopping, install_orderly_shutdown

pytestmark = pytest.mark.anyio


class Client:
    """What the shutdown uses of an engine client, and the order of events."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.engine_is_missed = False
        self.client = SimpleNamespace(
            shutdown=self._shutdown,
            output_processor=SimpleNamespace(propagate_error=self._requests_end),
        )

    def _shutdown(self, timeout: float | None = None) -> None:
        self.events.append(timeout)
        if self.engine_is_missed:
            self.client.output_processor.propagate_error(ValueError("the engine is dead"))

    def _requests_end(self, error: Exception) -> None:
        assert isinstance(error, ServerStopping)
        self.events.append(f"{error.http_status} {error.status_code}: {error}")

    async def stop_proofs(self) -> None:
        await asyncio.sleep(0.01)
        self.events.append("proofs stopped")
        # The loop is busy for a moment, and vLLM's thread goes on meanwhile.
        asyncio.get_running_loop().call_soon(time.sleep, 0.2)


ENDED = "503 503: The server is shutting down."


async def test_proofs_stop_before_the_engine_and_requests_that_may_finish_end_after_it() -> None:
    made = Client()
    install_orderly_shutdown(made.client, made.stop_proofs, 5.0)
    await asyncio.to_thread(partial(made.client.shutdown, timeout=3))
    await asyncio.sleep(0)
    assert made.events == ["proofs stopped", 3, ENDED]


@pytest.mark.parametrize("seconds", [0, None])
async def test_requests_without_time_to_finish_end_before_the_engine_reports_them(
    seconds: int | None,
) -> None:
    made = Client()
    install_orderly_shutdown(made.client, made.stop_proofs, 5.0)
    await asyncio.to_thread(partial(made.client.shutdown, timeout=seconds))
    await asyncio.sleep(0)
    assert made.events == ["proofs stopped", ENDED, seconds, ENDED]


async def test_requests_end_in_the_same_way_if_vllm_notices_the_end_of_the_engine_first() -> None:
    made = Client()
    made.engine_is_missed = True
    install_orderly_shutdown(made.client, made.stop_proofs, 5.0)
    await asyncio.to_thread(partial(made.client.shutdown, timeout=3))
    await asyncio.sleep(0)
    assert made.events == ["proofs stopped", 3, ENDED, ENDED]


async def test_proofs_that_hang_or_fail_do_not_keep_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def hangs() -> None:
        await asyncio.Event().wait()

    async def fails() -> None:
        raise ValueError("no")

    for step, seconds in ((hangs, 0.3), (fails, 30.0)):
        made = Client()
        install_orderly_shutdown(made.client, step, seconds)
        await asyncio.to_thread(made.client.shutdown)
        await asyncio.sleep(0)
        assert made.events == [ENDED, None, ENDED]
    ours = [r.levelname for r in caplog.records if r.name.startswith("proofserve")]
    assert ours == ["WARNING", "ERROR"]


async def test_on_the_loop_itself_only_the_engine_ends() -> None:
    made = Client()
    install_orderly_shutdown(made.client, made.stop_proofs, 5.0)
    made.client.shutdown(timeout=1)
    await asyncio.sleep(0)
    assert made.events == [1]
