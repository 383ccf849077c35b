"""vLLM in the caller's own process: its offline class ``LLM``, and its server's application.

Both check vLLM's version first. In another version the modules that they import then may fail
without advice.
"""

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp

from proofserve.engines.vetting.features import EMBEDDED, OFFLINE, PROOFS
from proofserve.engines.vetting.start import require_vetted, require_vetted_runner
from proofserve.engines.vllm.support import require_supported_options
from proofserve.rounds.records import Deferred, ProofBatch, Workload


class SyncProver:
    """Proves on ``vllm.LLM(...).llm_engine`` or any ``LLMEngine``, between its steps.

    The plugin must be loaded in the engine's process; it is when the package is installed and
    ``VLLM_PLUGINS`` is unset or names it (docs/offline.md).

    ``allow_unvetted``: accept a vLLM that was not vetted if it has every name that proofs rely on.
    Raises UnsupportedEngine for another version, or options with which proofs cannot run.
    """

    def __init__(self, llm_engine: Any, allow_unvetted: bool = False) -> None:
        require_vetted(allow_unvetted, (*PROOFS, *OFFLINE))
        require_vetted_runner(llm_engine.vllm_config)
        require_supported_options(llm_engine.vllm_config)
        from proofserve.engines.vllm.client import served_facts  # noqa: PLC0415

        self._engine = llm_engine
        self._facts = served_facts(llm_engine.vllm_config)

    def prove(self, work: Workload, nonces: Sequence[int]) -> ProofBatch | Deferred:
        """Prove ``nonces`` now, or answer ``Deferred`` at once while requests are unfinished.

        Raises EngineFault if the computation fails; the engine lives.
        """
        from proofserve.engines.vllm.client import PROVE, RELEASE, call_for, read_reply  # noqa: PLC0415
        from proofserve.engines.vllm.compat_client import call_engine_sync  # noqa: PLC0415

        call = call_for(work, self._facts, uuid.uuid4().hex, nonces, defer_s=0.0)
        try:
            return read_reply(nonces, call_engine_sync(self._engine, PROVE, call))
        finally:
            call_engine_sync(self._engine, RELEASE, call["lease"])


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

    ``allow_unvetted``: see ``require_vetted``.

    Raises:
        UnsupportedEngine: this vLLM version was not vetted, or proofs cannot run on it.
        SystemExit: vLLM's command line does not know an option; its usage is on stderr.
        RuntimeError: the engine core did not start; vLLM has logged the reason.
        Exception: vLLM's own errors about a model or options that it refuses.
    """
    require_vetted(allow_unvetted, EMBEDDED)
    from proofserve.engines.vllm import compat_server  # noqa: PLC0415

    args = compat_server.server_arguments(model, options)
    async with compat_server.running_app(args) as app:
        yield app
