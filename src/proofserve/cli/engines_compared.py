"""The engines whose noise can be measured, by the words that name them on the command line."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from proofserve.cli.model import Checkpoint
from proofserve.cli.recompute import Compute, by_checkpoint, by_node
from proofserve.cli.servers import ServerOptions, existing_server, serving
from proofserve.cli.session import CommandSession
from proofserve.cli.source_options import read_file
from proofserve.lab.client.errors import LabError
from proofserve.lab.verify.claimed import Claimed, Wanted
from proofserve.protocol.comparison import Claim
from proofserve.rounds.calls import chunks
from proofserve.rounds.records import Workload

DTYPES = ("float32", "bfloat16", "float16")
MOST_RANKS = 64
SPECS = "reference:float32, reference:bfloat16, vllm, vllm:tp2, a node's URL, or a file"
# Nonces of one call, and of one step of progress.
AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Task:
    """What a side shall compute, and for those that we run ourselves: by what and how.

    ``api_key`` is for a node that runs already and asks for one.
    """

    work: Workload
    nonces: Sequence[int]
    model: Checkpoint | None
    device: str
    forward_batch: int
    api_key: str | None = field(default=None, repr=False)

    def checkpoint(self, side: str) -> Checkpoint:
        """The model. Raises LabError if none was named."""
        if self.model is None:
            raise LabError(f"{side} needs a model; name one of ours, or a checkpoint's folder")
        return self.model


class ComparedEngine(Protocol):
    """One of the two engines."""

    @property
    def name(self) -> str:
        """As the command line says it."""
        ...

    @property
    def needs_model(self) -> bool:
        """Whether it computes from a checkpoint on this machine."""
        ...

    def artifacts(self, task: Task, desk: CommandSession) -> list[Claim]:
        """Those of the task's nonces, in their order. Raises what ``open_session`` can show."""
        ...


@dataclass(frozen=True, slots=True)
class Reference:
    """Plain transformers with weights and arithmetic of ``dtype``."""

    dtype: str
    needs_model = True

    @property
    def name(self) -> str:
        """See ``ComparedEngine``."""
        return f"reference:{self.dtype}"

    def artifacts(self, task: Task, desk: CommandSession) -> list[Claim]:
        """See ``ComparedEngine``."""
        model = task.checkpoint(self.name)
        desk.line.step(f"loading {model.name} as {self.dtype}")
        with desk.interrupts.allowed():
            compute = by_checkpoint(
                task.work, model.folder, self.dtype, task.device, task.forward_batch
            )
            return _in_steps(self.name, compute, task, desk)


@dataclass(frozen=True, slots=True)
class Vllm:
    """A server of ours on ``ranks`` devices, as ``check`` and ``bench`` start it."""

    ranks: int
    needs_model = True

    @property
    def name(self) -> str:
        """See ``ComparedEngine``."""
        return "vllm" if self.ranks == 1 else f"vllm:tp{self.ranks}"

    def artifacts(self, task: Task, desk: CommandSession) -> list[Claim]:
        """See ``ComparedEngine``."""
        model = task.checkpoint(self.name)
        deployment = ServerOptions(
            model.folder,
            model.name,
            task.forward_batch,
            scheme=task.work.scheme.name,
            ranks=self.ranks,
        )
        with serving(deployment, desk) as node:
            return _in_steps(self.name, by_node(task.work, node, model.name), task, desk)


@dataclass(frozen=True, slots=True)
class RunningNode:
    """A server that runs already, by its ``/generate``."""

    name: str
    needs_model = False

    def artifacts(self, task: Task, desk: CommandSession) -> list[Claim]:
        """See ``ComparedEngine``."""
        with existing_server(self.name, task.api_key, desk) as node:
            compute = by_node(task.work, node, node.models()[0])
            return _in_steps(self.name, compute, task, desk)


@dataclass(frozen=True, slots=True)
class Saved:
    """What another machine has computed, from a file; it decides what the other side computes."""

    name: str
    claimed: Claimed
    needs_model = False

    def artifacts(self, task: Task, desk: CommandSession) -> list[Claim]:  # noqa: ARG002 - nothing to do
        """See ``ComparedEngine``."""
        wanted = set(task.nonces)
        return [claim for claim in self.claimed.claims if claim.nonce in wanted]


def side_of(spec: str) -> ComparedEngine:
    """The engine that ``spec`` names. Raises LabError, also for a file that is no artifacts."""
    kind, _, detail = spec.partition(":")
    if spec.startswith(("http://", "https://")):
        return RunningNode(spec)
    if kind == "reference" and detail in DTYPES:
        return Reference(detail)
    if spec == "vllm":
        return Vllm(1)
    ranks = detail.removeprefix("tp")
    if kind == "vllm" and detail.startswith("tp") and ranks.isdecimal():
        if not 1 <= int(ranks) <= MOST_RANKS:
            raise LabError(f"{spec}: {ranks} ranks are outside 1..{MOST_RANKS}")
        return Vllm(int(ranks))
    if not Path(spec).is_file():
        raise LabError(f"{spec!r} is no engine and no file; choose from {SPECS}")
    return Saved(spec, read_file(Path(spec), Wanted()))


def _in_steps(name: str, compute: Compute, task: Task, desk: CommandSession) -> list[Claim]:
    calls = chunks(task.nonces, AT_ONCE)
    desk.line.step(f"{name}: {len(task.nonces)} nonces", len(calls))
    claims: list[Claim] = []
    for nonces in calls:
        claims += compute(nonces)
        desk.line.advance()
    return claims
