"""The file that carries what honest nodes look like from ``calibrate noise`` to ``verify``.

It holds for one model, scheme, ``seq_len``, ``k_dim`` and dtype of the validator, so the
file says all of them, and a judgement of anything else is refused. No field has a default.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from proofserve.lab.calibrate.direction import SuspectCosines
from proofserve.lab.client.errors import LabError
from proofserve.lab.report.json_files import read_json, write_json
from proofserve.lab.verify.claimed import ClaimedArtifacts, WorkOptions
from proofserve.lab.verify.direction import Expected
from proofserve.lab.verify.judges import Chances
from proofserve.protocol.verdict.direction import HonestSpread
from proofserve.protocol.verdict.scale import SCALES, ScaleFit, fitted
from proofserve.rounds.records import Workload

FORMAT: Final = "proofserve-calibration"
HOW_TO_CALIBRATE: Final = (
    "give --calibration FILE, which"
    " `proofserve calibrate noise MODEL --seq-len N --out FILE` writes, or --dist-threshold"
)
# An honest node's share of mismatches beside ``--dist-threshold``: the network's ``stat_test``.
NETWORK_P_MISMATCH: Final = 0.001
# The fields of a checkpoint's configuration in which models differ.
SHAPE_FIELDS: Final = ("hidden_size", "num_hidden_layers", "intermediate_size")

# The chance of convicting an honest node that fewer pairs carry is one in their number.
PAIRS_FOR_ANY_ALPHA: Final = 1000
# The largest honest distance over the one that the fit expects; beyond, the tail is not the fit's.
HEAVIEST_TAIL: Final = 1.5

Shape = Mapping[str, int]
Name = Annotated[str, Field(min_length=1)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Fit(_Strict):
    """A ``ScaleFit``. ``tail`` is the largest distance over the one that the fit expects."""

    s: Positive
    nu1: Positive
    nu2: Positive
    norms: list[Annotated[float, Field(ge=1.0)]] = Field(
        min_length=len(SCALES), max_length=len(SCALES)
    )
    tail: Positive

    @property
    def scale_fit(self) -> ScaleFit:
        return ScaleFit(self.s, self.nu1, self.nu2, tuple(self.norms))


class GreedyFields(_Strict):
    """At most a share ``rate`` of honest greedy tokens is more than ``gap`` below the largest."""

    gap: Positive
    rate: Annotated[float, Field(gt=0.0, lt=0.5)]


class SuspectFields(_Strict):
    """``SuspectCosines`` of one suspect."""

    honest_sd: Positive
    margin: Positive
    own_mean: float
    own_sd: Positive


class CalibrationFile(_Strict):
    """Honest distances, and what they were measured with. Distances are L2 between vectors.

    ``dtype`` is the one in which the validator computes, None if both engines were nodes or files.
    ``shape`` is None if there was no checkpoint. ``distances`` are those of all honest nonces,
    ``quantiles`` some of them by the share (0 to 1) of nonces at or below. At most ``p_mismatch``
    of the honest nonces are beyond ``dist_threshold``; ``p_mismatch_interval`` is the 95 %
    Clopper-Pearson interval of that share. ``paired`` is the fit of the distances over those of the
    validator's own run in the served dtype, None if that was not measured or tells no more.
    ``suspects`` are empty if no bank was measured.

    In a calibration of chat (scheme receipt-v1) a block of ``seq_len`` tokens stands for a nonce,
    and the figures after ``distances`` are widened, because blocks of one conversation are alike
    (``dependence``). Only there ``greedy`` is not None.
    """

    format: Literal["proofserve-calibration"]
    version: Literal[2]
    model: Name
    shape: dict[str, int] | None
    scheme: Name
    stronger_rng: bool
    seq_len: int = Field(ge=1)
    k_dim: int = Field(ge=1)
    dtype: Name | None
    engines: tuple[Name, Name]
    quantiles: dict[str, Annotated[float, Field(ge=0.0)]]
    dist_threshold: float = Field(gt=0.0, le=2.0)
    p_mismatch: float = Field(gt=0.0, lt=1.0)
    p_mismatch_interval: tuple[Probability, Probability]
    distances: list[Positive] = Field(min_length=2)
    fit: Fit
    paired: Fit | None
    suspects: dict[Name, SuspectFields]
    greedy: GreedyFields | None = None

    def write(self, path: Path) -> None:
        write_json(path, self.model_dump())

    def least_alpha(self, fit: Fit) -> float:
        """The least chance of convicting an honest node that these distances and a fit carry."""
        enough = len(self.distances) >= PAIRS_FOR_ANY_ALPHA and fit.tail <= HEAVIEST_TAIL
        return 0.0 if enough else 1.0 / len(self.distances)

    def carried(self, chances: Chances, fit: Fit) -> Chances:
        """``chances`` with an alpha that these distances carry for a test by ``fit``."""
        return replace(chances, alpha=max(chances.alpha, self.least_alpha(fit)))

    def directions(self) -> tuple[dict[str, Expected], dict[str, HonestSpread]]:
        """What the direction test needs to know, by the names of the suspects."""
        found = self.suspects.items()
        expected = {name: Expected(each.own_mean, each.own_sd) for name, each in found}
        return expected, {n: HonestSpread(each.honest_sd, each.margin) for n, each in found}

    def completed(self, given: WorkOptions, claimed: ClaimedArtifacts) -> WorkOptions:
        """``given`` with this file's lengths where neither it nor the source says them."""
        seq_len = given.seq_len or (None if claimed.seq_len else self.seq_len)
        k_dim = given.k_dim or (None if claimed.width else self.k_dim)
        scheme = given.scheme or (None if claimed.scheme else self.scheme)
        return replace(given, seq_len=seq_len, k_dim=k_dim, scheme=scheme)

    def require(self, work: Workload, models: Collection[str], shape: Shape | None) -> None:
        """Raise LabError, naming the field, unless the threshold holds for these artifacts.

        ``models`` are the names of the judged model, ``shape`` the shape of its checkpoint. The
        shapes decide where both are known; a served model has other names than its folder.
        """
        theirs = {"seq_len": work.seq_len, "stronger_rng": False, **work.scheme.to_wire()}
        theirs["scheme"] = theirs.pop("name")
        self.require_fields(theirs, models, shape)

    def require_fields(
        self, theirs: Mapping[str, object], models: Collection[str], shape: Shape | None
    ) -> None:
        """As ``require``, where ``theirs`` are the fields of what is judged."""
        for field, value in theirs.items():
            if getattr(self, field) != value:
                raise _misfit(field, getattr(self, field), f"the artifacts have {value}")
        if self.shape is None or shape is None:
            if self.model not in models:
                raise _misfit("model", self.model, f"the model is {' or '.join(models)}")
            return
        for field in {**self.shape, **shape}:
            if self.shape.get(field) != shape.get(field):
                raise _misfit(field, self.shape.get(field), f"the model has {shape.get(field)}")

    def validator_dtype(self, given: str | None) -> str | None:
        """The dtype to recompute in. Raises LabError if ``given`` by ``--dtype`` is another."""
        if self.dtype is not None and given not in {None, self.dtype}:
            raise _misfit("dtype", self.dtype, f"--dtype is {given}")
        return given or self.dtype


def fit_of(distances: NDArray[np.float64]) -> Fit:
    """The fit of honest ``distances`` [n], for a file. Raises ProtocolError as ``fitted``."""
    fit = fitted(distances)
    expected = fit.quantile(1.0 - 1.0 / (len(distances) + 1))
    fields = asdict(fit) | {"norms": list(fit.norms), "tail": float(distances.max()) / expected}
    return Fit(**fields)


def suspects_of(found: Mapping[str, SuspectCosines]) -> dict[str, SuspectFields]:
    return {
        name: SuspectFields(
            honest_sd=each.honest.sd,
            margin=each.honest.margin,
            own_mean=each.own.mean,
            own_sd=each.own.sd,
        )
        for name, each in found.items()
    }


def read(path: Path) -> CalibrationFile:
    """The calibration in a file. Raises LabError naming the field that is wrong."""
    try:
        return read_json(path, CalibrationFile)
    except LabError as error:
        raise LabError(f"{error}; write it by `calibrate noise`") from error


@dataclass(frozen=True, slots=True)
class MeasuredThreshold:
    """A threshold, the share of honest vectors beyond it, and where both come from."""

    dist_threshold: float
    p_mismatch: float
    origin: str
    calibration: CalibrationFile | None = None

    def require(self, work: Workload, models: Collection[str], shape: Shape | None) -> None:
        """Raise LabError, as ``CalibrationFile.require``, unless it holds or was given by hand."""
        if self.calibration is not None:
            self.calibration.require(work, models, shape)


def measured_threshold(
    dist_threshold: float | None, calibration: Path | None, p_mismatch: float | None
) -> MeasuredThreshold:
    """What the three options say. There is no default: a threshold belongs to a model.

    Raises LabError if neither a threshold nor a calibration is given, or both are, for a broken
    file, and for a ``p_mismatch`` that is not the calibration's.
    """
    if calibration is None:
        if dist_threshold is None:
            raise LabError(f"no threshold: {HOW_TO_CALIBRATE}")
        rate = NETWORK_P_MISMATCH if p_mismatch is None else p_mismatch
        return MeasuredThreshold(dist_threshold, rate, "given as --dist-threshold")
    if dist_threshold is not None:
        raise LabError("two thresholds: give --calibration or --dist-threshold, not both")
    measured = read(calibration)
    if p_mismatch not in {None, measured.p_mismatch}:
        known = f"{calibration} has {measured.p_mismatch:g}"
        raise LabError(f"p_mismatch: {known}; leave --p-mismatch out")
    return calibrated(measured)


def calibrated(measured: CalibrationFile) -> MeasuredThreshold:
    """The threshold of a calibration."""
    engines, count = " against ".join(measured.engines), len(measured.distances)
    unit = "nonces" if measured.greedy is None else f"blocks of {measured.seq_len} tokens"
    origin = f"calibration of {measured.model}: {engines}, {count} {unit}"
    return MeasuredThreshold(measured.dist_threshold, measured.p_mismatch, origin, measured)


def checkpoint_shape(folder: Path) -> dict[str, int] | None:
    """Those of ``SHAPE_FIELDS`` that a checkpoint's ``config.json`` has; None if it has none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
    except (OSError, ValueError, AttributeError):
        # Loading the checkpoint says what is wrong with it.
        return None
    return {name: config[name] for name in SHAPE_FIELDS if name in config} or None


def _misfit(field: str, ours: object, theirs: str) -> LabError:
    return LabError(f"{field}: the calibration has {ours}, {theirs}; write one for what is judged")
