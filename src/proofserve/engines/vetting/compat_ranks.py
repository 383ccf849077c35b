"""vLLM's private names in the engine core for the check of its ranks."""

from collections.abc import Callable
from typing import Any

# How long all ranks may take to answer, seconds.
ANSWER_S = 60.0


def ask_ranks(engine: Any, report: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """What ``report`` gives on each worker, in the order of their ranks.

    Raises TimeoutError, or what the executor raises for a worker that failed.

    Relies on: EngineCore.collective_rpc taking a callable, which every executor pickles by
    cloudpickle and calls with the worker, or with a wrapper that passes attributes on;
    WorkerBase.rank.
    """
    return list(engine.collective_rpc(report, ANSWER_S))


def ranks_of(engine: Any) -> int:
    """How many workers this core has, on all nodes. Relies on: ParallelConfig.world_size."""
    return int(engine.vllm_config.parallel_config.world_size)
