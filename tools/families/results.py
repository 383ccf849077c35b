"""What one subject gave, as a file beside the code: it can be tried again alone, anywhere."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from measuring.results import Kept
from proofserve_lab.check.checks import Check


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict about vectors of a node.

    ``size`` is the median of its errors over the validator's own, ``error`` their median and
    ``most`` the largest of them (L2). ``closest`` is the honest kernel that explains it best.
    """

    node: str
    verdict: str
    nonces: int
    size: float
    error: float
    most: float
    closest: str


@dataclass(frozen=True, slots=True)
class Winners:
    """How an honest node judged the winners of a distance round of another one."""

    node: str
    invalid: int
    of: int
    fraud: bool


@dataclass(slots=True)
class Row:
    """``checks`` and ``seconds`` are by step; ``errors`` say why a step ended before its end.

    ``machine`` is the one that ran them, in words.
    """

    name: str
    vllm: str = ""
    machine: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    checks: dict[str, list[Check]] = field(default_factory=dict)
    judged: list[Judged] = field(default_factory=list)
    winners: list[Winners] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


MEASURED: Final = Kept(Row, Path(__file__).with_name("measured"))
