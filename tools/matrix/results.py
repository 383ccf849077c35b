"""What the columns gave, as files beside the code: a column can be run again alone, anywhere.

Vectors of fixed nonces and the speed of forwards are those of this process's own vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from measuring.results import Kept
from proofserve.cli.model import checkpoint_named
from proofserve.cli.servers import ServerOptions, serving
from proofserve.cli.session import CommandSession
from proofserve.protocol.verdict.comparison import Claim
from proofserve_lab.nodes import bare_speed, distances
from proofserve_lab.orders import work_of_scheme

# By trained model, the scheme of its calibration, which says how far honest engines are apart.
SCHEMES: Final = {"trained": "sketch-v1", "trained_moe": "sketch-v2"}
SEQ_LEN = 256
NONCES = 64
FORWARD_BATCH = 8
FORWARDS = 20


@dataclass(frozen=True, slots=True)
class StepResult:
    """``detail``: the last line that the step printed."""

    name: str
    passed: bool
    seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A column's speed, and the vectors of its nonces in base64, each of ``width`` numbers."""

    vllm: str
    nonces_per_second: float
    width: int
    vectors: Mapping[str, str]

    def largest_distance(self, other: "Measured") -> float:
        return max(distances(self._claims(), other._claims(), self.width))

    def _claims(self) -> list[Claim]:
        return [Claim(int(nonce), text) for nonce, text in self.vectors.items()]


@dataclass(frozen=True, slots=True)
class ColumnResult:
    """``skipped`` says why nothing ran. ``measured`` has the models whose vectors were proved.

    ``machine`` is the one that ran the steps, in words.
    """

    minor: str
    runner: str
    skipped: str = ""
    machine: str = ""
    steps: list[StepResult] = field(default_factory=list)
    measured: Mapping[str, Measured] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.minor}-{self.runner}"

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)


MEASURED: Final = Kept(ColumnResult, Path(__file__).with_name("measured"))


def write_vectors(model: str, folder: Path, session: CommandSession) -> None:
    """Start a server, prove the nonces, and keep what it gave in ``folder``."""
    found = checkpoint_named(model, "tiny")
    work = work_of_scheme(SCHEMES[model], found.name, SEQ_LEN)
    options = ServerOptions(found.folder, found.name, FORWARD_BATCH, measure=True)
    with serving(options, session) as node:
        vectors = {str(a.nonce): a.vector_b64 for a in node.artifacts(work, range(NONCES))}
        bare_speed(node, work, FORWARDS)
        speed = bare_speed(node, work, FORWARDS).nonces_per_second
        made = Measured(node.versions()["vllm"], speed, work.width, vectors)
    Kept(Measured, folder).write(model, made)
