"""The API process's side of the check of all ranks."""

from typing import Any

from proofserve.engines.vllm import compat_client
from proofserve.engines.vllm.ranks.reports import RankReport, reporter

RANKS = "proofserve_ranks"


async def require_equal_ranks(engine_client: Any) -> str:
    """What every rank of every core has, in words. Blocks while it reads the package's sources.

    Raises EngineFault, by ``core.require_equal``, if a rank has something else, lacks proofserve
    or does not answer; and EngineGone.
    """
    own = reporter()(None)
    hosts: set[str] = set()
    for core in range(compat_client.core_count(engine_client)):
        hosts.update(await compat_client.call_engine(engine_client, RANKS, own, core=core))
    return f"{RankReport(**own)} on every rank, hosts: {', '.join(sorted(hosts))}"
