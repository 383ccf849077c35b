"""Proofs on vLLM's offline class ``LLM``, without a server (docs/offline.md)."""

import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from proofserve.engines.vllm import compat_client, support
from proofserve.engines.vllm.client import PROVE, RELEASE, call_for, read_reply, served_facts
from proofserve.engines.vllm.vetting.node_pins import PROOFS
from proofserve.engines.vllm.vetting.server_pins import OFFLINE
from proofserve.engines.vllm.vetting.start import require_vetted, require_vetted_runner
from proofserve.rounds.records import Deferred, ProofBatch, Workload


class SyncProver:
    """Proves on ``vllm.LLM(...).llm_engine`` or any ``LLMEngine``, between its steps.

    The plugin must be loaded in the engine's process; it is when the package is installed and
    ``VLLM_PLUGINS`` is unset or names it.

    ``allow_unvetted``: accept a vLLM that was not vetted if it has every name that proofs rely on.
    Raises UnsupportedEngine for another version, or options with which proofs cannot run.
    """

    def __init__(self, llm_engine: Any, allow_unvetted: bool = False) -> None:
        require_vetted(allow_unvetted, (PROOFS, OFFLINE))
        require_vetted_runner(llm_engine.vllm_config)
        support.require_supported_options(llm_engine.vllm_config)
        self._engine = llm_engine
        self._facts = served_facts(llm_engine.vllm_config)

    def prove(self, work: Workload, nonces: Sequence[int]) -> ProofBatch | Deferred:
        """Prove ``nonces`` now, or answer ``Deferred`` at once while requests are unfinished.

        Raises:
            EngineFault: the computation failed; the engine lives.
        """
        call = call_for(work, self._facts, uuid.uuid4().hex, nonces, defer_s=0.0)
        try:
            return read_reply(
                nonces, compat_client.call_engine_sync(self._engine, PROVE, asdict(call))
            )
        finally:
            compat_client.call_engine_sync(self._engine, RELEASE, call.lease)
