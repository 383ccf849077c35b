"""vLLM's private names at its engine's client, in the process that serves or embeds the engine.

Only ``compat_client``, ``compat_core``, ``compat_worker`` and ``compat_server`` (named by the
process that they run in), the ``compat`` modules of ``receipts``, and ``support`` use private
names of vLLM. Each function names what it relies on. ``vetting`` has those names as data, and
``tests/contract`` checks them in every vetted version, so that an upgrade fails in a test that
says which caller breaks, not in a running node. vLLM's objects are ``Any`` on purpose: their
annotations change with every release.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from http import HTTPStatus
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from proofserve.rounds.errors import EngineFault, EngineGone

try:
    from vllm.exceptions import GenerationError, GracefulHTTPError
except ImportError:  # before 0.29
    from vllm.entrypoints.openai.engine.protocol import GenerationError

    GracefulHTTPError = EngineDeadError

_logger = logging.getLogger(__name__)


class ServerStopping(GracefulHTTPError, GenerationError):  # type: ignore[misc]  # Any to mypy
    """Answer to a request that the engine did not finish: status 503.

    Relies on: AsyncLLM.generate raising a GracefulHTTPError, and before 0.29 an EngineDeadError, as
    it is; errors of HTTP taking its status; streams turning a GenerationError into an event without
    a traceback in the log.
    """

    def __init__(self) -> None:
        # Not by the bases: their arguments differ between versions.
        Exception.__init__(self, "The server is shutting down.")
        self.message = str(self)
        self.status_code = self.http_status = HTTPStatus.SERVICE_UNAVAILABLE


def install_orderly_shutdown(
    engine_client: Any, first: Callable[[], Coroutine[Any, Any, None]], seconds: float
) -> None:
    """Run ``first`` before the engine ends, and end all unfinished requests with it.

    After SIGTERM vLLM's server first shuts its engine down, from another thread while its loop
    still runs. ``first`` then runs on the present loop, for ``seconds`` at most. vLLM alone never
    answers unfinished requests, and waits for their clients to leave; here each ends at once: an
    open stream with an error event, another request with status 503. An engine that gives its
    requests no time may still report them as finished, so they end before it; otherwise after it.
    An application that shuts the engine down on the loop ends its requests before.

    Relies on: AsyncLLM.shutdown(timeout), called by the launcher in an executor;
    AsyncLLM.output_processor.propagate_error, looked up on the instance; a request's queue keeping
    an error until it is read.
    """
    loop, loop_thread = asyncio.get_running_loop(), threading.get_ident()
    shutdown = engine_client.shutdown

    def orderly_shutdown(timeout: float | None = None) -> None:
        if threading.get_ident() == loop_thread or not loop.is_running():
            shutdown(timeout=timeout)
            return
        ending = asyncio.run_coroutine_threadsafe(first(), loop)
        if not wait([ending], seconds).done:
            _logger.warning("proofs did not stop within %g s; the engine ends now", seconds)
        elif error := ending.exception():
            _logger.error("proofs failed to stop before the end of the engine", exc_info=error)
        propagate = engine_client.output_processor.propagate_error
        # vLLM's own task may notice the engine's end first, and would report it as a fault.
        engine_client.output_processor.propagate_error = lambda _: propagate(ServerStopping())
        if not timeout:
            ended: Future[None] = Future()
            loop.call_soon_threadsafe(lambda: ended.set_result(propagate(ServerStopping())))
            wait([ended], seconds)
        shutdown(timeout=timeout)
        loop.call_soon_threadsafe(propagate, ServerStopping())

    engine_client.shutdown = orderly_shutdown


def core_count(engine_client: Any) -> int:
    """The engine cores of this client. Each rank of ``--data-parallel-size`` is one.

    Relies on: AsyncLLM.engine_core.core_engines.
    """
    return len(engine_client.engine_core.core_engines)


def unfinished_by_core(engine_client: Any) -> list[int]:
    """How many chat requests of this API process each engine core has not finished.

    Relies on: AsyncLLM.output_processor.request_states; AsyncLLM.engine_core.core_engines, and
    DPLBAsyncMPClient.reqs_in_flight, which only a client that chooses among cores has.
    """
    cores = list(engine_client.engine_core.core_engines)
    requests = engine_client.output_processor.request_states
    if len(cores) == 1:
        return [len(requests)]
    core_of = engine_client.engine_core.reqs_in_flight
    counts = Counter(core_of.get(request) for request in list(requests))
    return [counts[core] for core in cores]


async def call_engine(engine_client: Any, method: str, *args: Any, core: int = 0) -> Any:
    """Run an EngineCore method of ``core`` between two engine steps and await its result.

    Raises EngineGone, or EngineFault with the engine's own text.

    Relies on: AsyncLLM.engine_core._call_utility_async(method, *args, engine), and core_engines
    being in the order of their ranks. The public call_utility_async asks all cores, and returns
    the answer of the first one.
    """
    client = engine_client.engine_core
    try:
        return await client._call_utility_async(method, *args, engine=client.core_engines[core])
    except EngineDeadError as error:
        raise EngineGone("the engine process has died; restart the server") from error
    except Exception as error:
        raise EngineFault(str(error)) from error


def call_engine_sync(llm_engine: Any, method: str, *args: Any) -> Any:
    """Run an EngineCore method of a synchronous engine, in this process or in its own.

    Relies on: LLMEngine.engine_core being an InprocClient (``.engine_core``) or a SyncMPClient
    (``.call_utility``).
    """
    client = llm_engine.engine_core
    if hasattr(client, "call_utility"):
        return client.call_utility(method, *args)
    result = getattr(client.engine_core, method)(*args)
    return result.result() if isinstance(result, Future) else result
