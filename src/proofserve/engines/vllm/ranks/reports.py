"""What a process has: the version of proofserve, a digest of its source files, and its model."""

# ruff: noqa: PLC0415 - see ``reporter``

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one process has. ``rank`` is None for a process that is no worker.

    ``version`` and ``digest`` (64 hexadecimal digits) are None if it cannot import proofserve.
    ``obstacle`` says why a block cannot choose the experts of its model; None if it can.
    """

    rank: int | None
    host: str
    version: str | None
    digest: str | None
    obstacle: str | None = None

    def __str__(self) -> str:
        if self.version is None or self.digest is None:
            return "no proofserve"
        return f"proofserve {self.version} (sources {self.digest[:SHOWN_DIGITS]})"


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


def differences(own: RankReport, ranks: Sequence[RankReport]) -> list[str]:
    """A sentence for each rank whose version or digest is not that of ``own``."""
    return [
        f"rank {each.rank} on host {each.host} has {each}, and this server on host {own.host} "
        f"has {own}."
        for each in ranks
        if (each.version, each.digest) != (own.version, own.digest)
    ]
