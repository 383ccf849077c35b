"""The file that carries a measured threshold from ``calibrate noise`` to ``verify`` and ``audit``.

A threshold holds for one model, scheme, ``seq_len``, ``k_dim`` and dtype of the validator, so the
file says all of them, and a judgement of anything else is refused. No field has a default.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from proofserve.lab.client.errors import LabError
from proofserve.lab.report.json_files import read_json, write_json
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

Shape = Mapping[str, int]
Name = Annotated[str, Field(min_length=1)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class CalibrationFile(BaseModel):
    """A threshold, and what it was measured with. Distances are L2 between vectors of length 1.

    ``dtype`` is the one in which the validator computes, None if both engines were nodes or files.
    ``shape`` is None if there was no checkpoint. ``quantiles`` are honest distances by the
    share (0 to 1) of nonces at or below them. At most ``p_mismatch`` of the honest nonces are
    beyond ``dist_threshold``; ``p_mismatch_interval`` is the 95 % Clopper-Pearson interval of that
    share, from these ``nonces``.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    format: Literal["proofserve-calibration"]
    version: Literal[1]
    model: Name
    shape: dict[str, int] | None
    scheme: Name
    stronger_rng: bool
    seq_len: int = Field(ge=1)
    k_dim: int = Field(ge=1)
    dtype: Name | None
    engines: tuple[Name, Name]
    nonces: int = Field(ge=1)
    quantiles: dict[str, Annotated[float, Field(ge=0.0)]]
    dist_threshold: float = Field(gt=0.0, le=2.0)
    p_mismatch: float = Field(gt=0.0, lt=1.0)
    p_mismatch_interval: tuple[Probability, Probability]

    def write(self, path: Path) -> None:
        write_json(path, self.model_dump())

    def require(self, work: Workload, models: Collection[str], shape: Shape | None) -> None:
        """Raise LabError, naming the field, unless the threshold holds for these artifacts.

        ``models`` are the names of the judged model, ``shape`` the shape of its checkpoint. The
        shapes decide where both are known; a served model has other names than its folder.
        """
        theirs = {"seq_len": work.seq_len, **work.scheme.to_wire()}
        theirs["scheme"] = theirs.pop("name")
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
    one, other = measured.engines
    origin = f"calibration of {measured.model}: {one} against {other}, {measured.nonces} nonces"
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
