"""Starts the watch of an engine's cores, in an API process."""

import logging
from typing import Any

from proofserve.engines.vllm import compat_client
from proofserve.engines.vllm.client import VllmEngine
from proofserve.engines.vllm.liveness.compat_progress import unfinished_by_core
from proofserve.engines.vllm.liveness.memory import CoreMemory, MemoryAddress, MemoryLost
from proofserve.engines.vllm.liveness.watch import CoreView, LivenessWatch

_logger = logging.getLogger(__name__)

JOIN = "proofserve_liveness"


async def watch_of(engine_client: Any, engine: VllmEngine, limit_s: float) -> LivenessWatch:
    """The watch of all cores of ``engine``. Raises EngineFault and EngineGone."""
    cores = [await _watched(engine_client, core) for core in range(engine.cores)]

    def unfinished() -> list[int]:
        chat = unfinished_by_core(engine_client)
        return [count + engine.open_calls[core] for core, count in enumerate(chat)]

    return LivenessWatch(cores, unfinished, limit_s)


async def _watched(engine_client: Any, core: int) -> CoreView | None:
    address = MemoryAddress(**await compat_client.call_engine(engine_client, JOIN, core=core))
    try:
        return CoreView(core, address, CoreMemory.of_core(address))
    except MemoryLost as error:
        text = "engine core %d cannot be watched, so that a hang of it is not noticed: %s"
        _logger.warning(text, core, error)
        return None
