"""vLLM's own server application in the caller's process and event loop, without a server."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.types import ASGIApp

from proofserve.engines.vllm.vetting.server_pins import EMBEDDED
from proofserve.engines.vllm.vetting.start import require_vetted


@asynccontextmanager
async def vllm_app(
    model: str, options: Sequence[str], allow_unvetted: bool = False
) -> AsyncIterator[ASGIApp]:
    """The application that ``vllm serve MODEL OPTIONS`` would serve, ready for requests.

    Its lifespan begins and ends with the context, so the server that serves it must not start
    the lifespan too. End the requests first: the context then ends the proof rounds, and last the
    engine. After the death of the engine ``GET /health`` answers 503; nothing restarts it.

    The event loop is blocked while the model loads, and for seconds while the engine ends.
    Options about addresses, TLS and the number of API processes have no effect. vLLM and the
    plugins read their environment when the context is entered. The engine core is a spawned
    process, which imports the main module again: guard its code by ``__name__ == "__main__"``.

    ``allow_unvetted``: see ``vetting.start.require_vetted``.

    Raises:
        UnsupportedEngine: this vLLM version was not vetted, or proofs cannot run on it.
        SystemExit: vLLM's command line does not know an option; its usage is on stderr.
        RuntimeError: the engine core did not start; vLLM has logged the reason.
        Exception: vLLM's own errors about a model or options that it refuses.
    """
    require_vetted(allow_unvetted, (EMBEDDED,))
    # After the version check: in another version this import may fail without advice.
    from proofserve.engines.vllm import compat_server  # noqa: PLC0415

    args = compat_server.server_arguments(model, options)
    async with compat_server.running_app(args) as app:
        yield app
