"""Proofs on vLLM's offline class ``LLM``, without a server (docs/offline.md)."""

import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from proofserve.engines.vllm import compat_client, support
from proofserve.engines.vllm.client import PROVE, RELEASE, call_for, read_reply, served_facts
from proofserve.rounds.records import Deferred, ProofBatch, Workload


class SyncProver:
    """Proves on ``vllm.LLM(...).llm_engine`` or any ``LLMEngine``, between its steps.

    The plugin must be loaded in the engine's process; it is when the package is installed and
    ``VLLM_PLUGINS`` is unset or names it.
    """

    def __init__(self, llm_engine: Any) -> None:
        support.require_tested_version()
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
