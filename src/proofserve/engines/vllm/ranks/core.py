"""The method that ``plugin.general`` adds to vLLM's engine core for the check of its ranks."""

from typing import Any

from proofserve.engines.vllm.ranks.compat_ranks import ask_ranks, ranks_of
from proofserve.engines.vllm.ranks.reports import RankReport, differences, reporter
from proofserve.engines.vllm.support import UnsupportedEngine


def require_equal(engine: Any, own: dict[str, Any]) -> dict[str, Any]:
    """The ``hosts`` of all ranks, which must have the proofserve of the API process, ``own``.

    ``obstacle`` is that of the first rank which has one, as in ``RankReport``.

    The core compares, not the API process, so that each of several cores refuses for itself.

    Raises UnsupportedEngine that names each other rank, its host and both versions, or says that a
    rank did not answer; and what the executor raises for a worker that failed.
    """
    ranks = [RankReport(**report) for report in ask_ranks(engine, reporter())]
    if len(ranks) != ranks_of(engine):
        raise UnsupportedEngine(f"{len(ranks)} of {ranks_of(engine)} ranks answered")
    if found := differences(RankReport(**own), ranks):
        raise UnsupportedEngine(
            f"{' '.join(found)} Install the same release of proofserve in vLLM's environment on "
            "every node, and start the server again."
        )
    obstacle = next((rank.obstacle for rank in ranks if rank.obstacle), None)
    return {"hosts": sorted({rank.host for rank in ranks}), "obstacle": obstacle}
