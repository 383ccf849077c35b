"""The API process's side of the check of all ranks."""

from dataclasses import dataclass
from typing import Any

from proofserve.engines.vllm import compat_client
from proofserve.engines.vllm.ranks.reports import RankReport, reporter

RANKS = "proofserve_ranks"


@dataclass(frozen=True, slots=True)
class EqualRanks:
    """What every rank of every core has, in words, and the ``obstacle`` as in ``RankReport``."""

    text: str
    obstacle: str | None


async def require_equal_ranks(engine_client: Any) -> EqualRanks:
    """Ask every rank of every core. Blocks while it reads the package's sources.

    Raises EngineFault, by ``core.require_equal``, if a rank has something else, lacks proofserve
    or does not answer; and EngineGone.
    """
    own = reporter()(None)
    hosts: set[str] = set()
    obstacle = None
    for core in range(compat_client.core_count(engine_client)):
        found = await compat_client.call_engine(engine_client, RANKS, own, core=core)
        hosts.update(found["hosts"])
        obstacle = obstacle or found["obstacle"]
    text = f"{RankReport(**own)} on every rank, hosts: {', '.join(sorted(hosts))}"
    return EqualRanks(text, obstacle)
