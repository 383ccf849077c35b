"""What was found, as it is kept between runs: a file for each model and scheme."""

from dataclasses import dataclass

CALIBRATED, LEFT_OUT, UNCALIBRATED = FORMS = ("calibrated", "left out", "uncalibrated")


@dataclass(frozen=True, slots=True)
class Cell:
    """How the simulated verifications of an honest node ended; ``soon`` counts early clearings."""

    convicted: int
    cleared: int
    soon: int
    unexplained: int
    undecided: int
    closest: str


@dataclass(frozen=True, slots=True)
class HonestNode:
    """``processor`` is what a real node ran on; None if it is emulated. ``cells`` are by form.

    ``size`` is the median length of its errors over our own.
    """

    name: str
    processor: str | None
    nonces: int
    size: float
    cells: dict[str, Cell]


@dataclass(frozen=True, slots=True)
class Cheat:
    """A node that serves ``weights`` by the kernels ``kernel`` in a ``share`` of its nonces.

    ``size`` is the median length of these errors over our own, ``footprint`` their mean cosine with
    ours. ``convicts_at`` are the nonces after which half, and 99.9 %, of the verifications have
    convicted it, None beyond the most. ``cleared`` counts those that clear it.
    """

    weights: str
    kernel: str
    share: float
    size: float
    footprint: float
    convicts_at: tuple[int | None, int | None]
    cleared: int


@dataclass(frozen=True, slots=True)
class Forged:
    """A file, most of it invented: ``convicted`` of ``times``, after ``most`` nonces or less."""

    tests: str
    convicted: int
    times: int
    most: int


@dataclass(frozen=True, slots=True)
class Found:
    """Of one model and scheme. ``calibration`` says in words which one the model has."""

    arch: str
    scheme: str
    seq_len: int
    runs: int
    most: int
    soon: int
    runs_of_cheats: int
    calibration: str
    honest: tuple[HonestNode, ...]
    cheats: tuple[Cheat, ...]
    forged: tuple[Forged, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.arch}-{self.scheme}"
