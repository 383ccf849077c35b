"""The methods of receipts that ``plugin.general`` adds to vLLM's engine core."""

from concurrent.futures import Future
from typing import Any

from proofserve.engines.vllm.receipts.collector import AnswerCollector
from proofserve.engines.vllm.receipts.compat_answers import WatchedCore
from proofserve.engines.vllm.receipts.messages import TapPlan


def start(engine: Any, plan: dict[str, Any]) -> None:
    """Tap the workers and watch the scheduler from now on.

    Raises UnsupportedEngine, RuntimeError if that was done before, and what a worker raised.
    """
    if hasattr(engine, "proofserve_answers"):
        raise RuntimeError("receipts were started before")
    core = WatchedCore(engine)
    core.start_tap(TapPlan(**plan))
    engine.proofserve_answers = AnswerCollector(core)
    core.watch(engine.proofserve_answers.ended, engine.proofserve_answers.stepped)


def answers(engine: Any) -> "Future[dict[str, Any]]":
    collector: AnswerCollector = engine.proofserve_answers
    return collector.wait()
