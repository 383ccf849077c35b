"""At the start of a server: every rank, on whatever machine, must have the same proofserve.

The API process asks each engine core, the core asks its ranks and compares, so that each of several
cores refuses for itself.
"""

# ruff: noqa: PLC0415 - see ``reporter`` and ``require_equal``

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from proofserve.engines.vllm import compat_client
from proofserve.engines.vllm.support import UnsupportedEngine

RANKS = "proofserve_ranks"


async def require_equal_ranks(engine_client: Any) -> tuple[str, str | None]:
    """Ask every rank of every core. Blocks while it reads the package's sources.

    Returns what all of them have, in words, and the ``obstacle`` as in ``RankReport``.

    Raises EngineFault, by ``require_equal``, if a rank has something else, lacks proofserve
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
    return text, obstacle


def require_equal(engine: Any, own: dict[str, Any]) -> dict[str, Any]:
    """The ``hosts`` of all ranks, which must have the proofserve of the API process, ``own``.

    ``obstacle`` is that of the first rank which has one, as in ``RankReport``.

    Raises UnsupportedEngine that names each other rank, its host and both versions, or says that a
    rank did not answer; and what the executor raises for a worker that failed.
    """
    # Only for the core: an API process would wait for the imports of vLLM's workers.
    from proofserve.engines.vllm.compat_core import ask_ranks, ranks_of

    ranks = [RankReport(**report) for report in ask_ranks(engine, reporter())]
    if len(ranks) != ranks_of(engine):
        raise UnsupportedEngine(f"{len(ranks)} of {ranks_of(engine)} ranks answered")
    mine = RankReport(**own)
    found = [
        f"rank {each.rank} on host {each.host} has {each}, and this server on host {mine.host} "
        f"has {mine}."
        for each in ranks
        if (each.version, each.digest) != (mine.version, mine.digest)
    ]
    if found:
        raise UnsupportedEngine(
            f"{' '.join(found)} Install the same release of proofserve in vLLM's environment on "
            "every node, and start the server again."
        )
    obstacle = next((rank.obstacle for rank in ranks if rank.obstacle), None)
    return {"hosts": sorted({rank.host for rank in ranks}), "obstacle": obstacle}


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one process has. ``rank`` is None for a process that is no worker.

    ``version`` and ``digest`` (of all source files, 64 hexadecimal digits) are None if it cannot
    import proofserve. ``obstacle`` says why a block cannot choose the experts of its model; None if
    it can.
    """

    rank: int | None
    host: str
    version: str | None
    digest: str | None
    obstacle: str | None = None

    def __str__(self) -> str:
        if self.version is None or self.digest is None:
            return "no proofserve"
        return f"proofserve {self.version} (sources {self.digest[:12]})"


def reporter() -> Callable[[Any], dict[str, Any]]:
    """A function that takes the worker it runs on, or None, and gives a RankReport's fields.

    It imports what it needs and refers to nothing of this package. So an executor sends it to the
    workers as code, not by name, and it also runs where proofserve is missing.
    """

    def report(worker: Any) -> dict[str, Any]:
        import hashlib
        import socket
        from pathlib import Path

        found = {"rank": getattr(worker, "rank", None), "host": socket.gethostname()}
        try:
            import proofserve
        except ImportError:
            return {**found, "version": None, "digest": None}
        folder = Path(proofserve.__path__[0])
        digest = hashlib.sha256()
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder).as_posix()
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        found |= {"version": proofserve.__version__, "digest": digest.hexdigest()}
        if (runner := getattr(worker, "model_runner", None)) is not None:
            from proofserve.engines.vllm.compat_worker import obstacle_to_seeded_experts

            found["obstacle"] = obstacle_to_seeded_experts(runner)
        return found

    return report
