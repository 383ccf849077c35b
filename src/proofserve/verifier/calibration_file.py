"""The file that carries what honest nodes look like from ``calibrate noise`` to ``verify``.

It holds for one model, its weights and dtypes, one scheme, ``seq_len`` and ``k_dim``, and for the
kernels whose figures it has, so it says all of them, and a judgement of anything else is refused.
The figures are raw: every fit is made of them when the file is read.
"""

import itertools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from proofserve.protocol import SKETCH_2, SKETCHES, TWINS, default_k_dim
from proofserve.protocol.receipts.record import SCHEME as RECEIPTS
from proofserve.remote.records import Work
from proofserve.reports import ReportedError, read_json
from proofserve.rounds.records import Workload
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.orders import WorkOptions
from proofserve.verifier.populations import HonestPopulations, HonestRuns, RunFigures, populations

VERSION: Final = 4
HOW_TO_CALIBRATE: Final = (
    "give --calibration FILE, which"
    " `proofserve calibrate noise MODEL --seq-len N --out FILE` writes, or --dist-threshold"
)
# An honest node's share of mismatches beside ``--dist-threshold``: the network's ``stat_test``.
NETWORK_P_MISMATCH: Final = 0.001
# The fields of a checkpoint's configuration in which models differ.
SHAPE_FIELDS: Final = ("hidden_size", "num_hidden_layers", "intermediate_size")
# Keys and values in the dtype that is served.
KV_AUTO: Final = "auto"
# Digits of a figure in the file. Honest errors are known to no more.
DIGITS: Final = 4

Shape = Mapping[str, int]
Name = Annotated[str, Field(min_length=1)]
Cosine = Annotated[float, Field(ge=-1.0, le=1.0)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class KernelFacts(_Strict):
    """On what a population ran. ``emulated`` by the reference engine, else a real engine.

    None is what the engine did not say. ``ranks`` counts the devices that share each layer.
    """

    name: Name
    emulated: bool
    engine: str | None
    processor: str | None
    torch: str | None
    dtype: str | None
    kv_dtype: str | None
    attention: str | None
    ranks: int | None = Field(ge=1)

    def named_beside(self, taken: Collection[str]) -> Self:
        """These facts; two machines of one kind are two populations, so the name gets a number."""
        names = itertools.chain([self.name], (f"{self.name} ({n})" for n in itertools.count(2)))
        return self.model_copy(update={"name": next(each for each in names if each not in taken)})


class FigureFields(_Strict):
    """``RunFigures`` of a run: lengths of its errors (L2), and cosines.

    A kernel in float32 may send the published vector: then the length is 0. ``rows`` are None for
    the first nonces of the references, in their order.
    """

    lengths: list[Annotated[float, Field(ge=0.0)]] = Field(min_length=2)
    footprints: dict[Name, list[Cosine]] = Field(min_length=1)
    cosines: dict[Name, list[Cosine]]
    rows: list[Annotated[int, Field(ge=0)]] | None

    @property
    def figures(self) -> RunFigures:
        return RunFigures(
            lengths=np.array(self.lengths),
            footprints={name: np.array(values) for name, values in self.footprints.items()},
            cosines={name: np.array(values) for name, values in self.cosines.items()},
            rows=np.arange(len(self.lengths)) if self.rows is None else np.array(self.rows),
        )


class PopulationFields(_Strict):
    facts: KernelFacts
    figures: FigureFields


class LeftOutCheck(_Strict):
    """Whether the calibration holds for kernels that it lacks, tried with its own left out.

    Each population of which the figures are at hand was left out in turn, and verified
    ``verifications`` times at up to ``nonces`` nonces by the others with all margins ``room`` times
    as wide. ``convicted`` has those that were convicted with a ``room`` of 1.
    """

    verifications: int = Field(ge=1)
    nonces: int = Field(ge=1)
    room: float = Field(ge=1.0)
    convicted: dict[Name, int]


class _Header(BaseModel):
    """What every version of the file has."""

    format: Literal["proofserve-calibration"]
    version: int
    model: str = "MODEL"
    scheme: str = ""
    seq_len: int | None = None


class CalibrationFile(_Strict):
    """Honest runs of one model, on the same nonces of one block and key.

    Errors are those of vectors less the published model's in float32. Some emulated kernels are
    ``references``: our own run of one of them, on all nonces, is what a node is judged beside.
    ``shape`` is None if the checkpoint does not say one. ``suspects`` are lengths of what suspected
    weights change in the first nonces. At most ``p_mismatch`` of the honest nonces are beyond
    ``dist_threshold``.

    In a calibration of chat (scheme receipt-v1) a block of ``seq_len`` tokens stands for a nonce,
    and ``groups`` says of each to which conversation it belongs, because blocks of one are alike
    (``dependence``).
    """

    format: Literal["proofserve-calibration"]
    version: Literal[4]
    model: Name
    shape: dict[str, int] | None
    weights_digest: Name | None
    served_dtype: Name
    kv_dtype: Name
    scheme: Name
    stronger_rng: bool
    seq_len: int = Field(ge=1)
    k_dim: int = Field(ge=1)
    block_hash: str
    public_key: str
    populations: list[PopulationFields] = Field(min_length=1)
    suspects: dict[Name, list[Annotated[float, Field(gt=0.0)]]]
    dist_threshold: float = Field(gt=0.0, le=2.0)
    p_mismatch: float = Field(gt=0.0, lt=1.0)
    left_out: LeftOutCheck | None
    groups: list[int] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        runs = {each.facts.name: each for each in self.populations}
        if len(runs) != len(self.populations):
            raise ValueError("populations: two have the same name")
        for name in self.references:
            if name not in runs or not runs[name].facts.emulated:
                raise ValueError(f"populations: the reference {name} is not one of them")
            if min(runs[name].figures.lengths) == 0.0:
                raise ValueError(f"populations: {name} has no error, so nothing compares with it")
        for each in self.populations:
            if {*each.figures.footprints} != {*self.references}:
                raise ValueError(f"footprints: {each.facts.name} has others than the first one")
            if max(each.figures.figures.rows, default=0) >= self.nonces:
                raise ValueError(f"populations: {each.facts.name} has nonces that our runs lack")
        return self

    @property
    def references(self) -> tuple[str, ...]:
        return tuple(self.populations[0].figures.footprints)

    @property
    def nonces(self) -> int:
        """Those of every reference; in a calibration of chat the blocks of tokens."""
        return min(len(self.own(name).lengths) for name in self.references)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The calibration in a file. Raises ReportedError naming the field that is wrong."""
        try:
            found = read_json(path, _Header)
        except ReportedError:
            # Reading all of it says what is wrong.
            found = None
        if found is not None and found.version < VERSION:
            anew = f"noise {found.model} --seq-len {found.seq_len or 'N'}"
            if found.scheme == RECEIPTS:
                anew = f"chat {found.model}"
            raise ReportedError(
                f"version: {path} is a calibration of version {found.version}, this program reads"
                f" {VERSION}: the old one has no footprints of honest kernels; measure"
                f" anew by `proofserve calibrate {anew} --out FILE`"
            )
        try:
            return read_json(path, cls)
        except ReportedError as error:
            raise ReportedError(
                f"{error}; write it by `calibrate noise` or `calibrate chat`"
            ) from error

    def write(self, path: Path) -> None:
        """Raises OSError. On one line: the figures are many, and for programs."""
        path.write_text(self.model_dump_json() + "\n", encoding="utf-8")

    def null(self, reference: str, room: float) -> HonestPopulations:
        """What honest means beside our own run of ``reference``, all margins ``room`` as wide."""
        runs = {each.facts.name: each.figures.figures for each in self.populations}
        measured = {each.facts.name for each in self.populations if not each.facts.emulated}
        groups = None if self.groups is None else np.array(self.groups)
        known = HonestRuns(runs, measured, self.predicted, self.width, groups)
        return populations(known, reference, room)

    @property
    def predicted(self) -> dict[str, NDArray[np.float64]]:
        """Lengths of what each suspect changes, float64 [m] of the first nonces."""
        return {name: np.array(lengths) for name, lengths in self.suspects.items()}

    def own(self, reference: str) -> RunFigures:
        """What our own run of ``reference`` showed, on all nonces."""
        (found,) = (each for each in self.populations if each.facts.name == reference)
        return found.figures.figures

    def honest(self, reference: str) -> HonestPopulations:
        """What honest means to a verdict: with the room that its own check asked for."""
        return self.null(reference, self.left_out.room if self.left_out else 1.0)

    @property
    def width(self) -> int:
        """Values of a vector: a nonce of a sketch has two twins, a block of chat its tokens."""
        if self.scheme == RECEIPTS:
            return self.seq_len * self.k_dim
        return (TWINS if self.scheme in SKETCHES else 1) * self.k_dim

    @property
    def origin(self) -> str:
        """Where the honest figures are from, for a reader."""
        emulated = sum(each.facts.emulated for each in self.populations)
        measured = len(self.populations) - emulated
        return (
            f"calibration of {self.model}: {measured} measured and {emulated} emulated kernels,"
            f" {self.nonces} {'nonces' if self.groups is None else 'blocks of tokens'}"
        )

    def completed(self, given: WorkOptions, claimed: ClaimedArtifacts) -> WorkOptions:
        """``given`` with this file's lengths where neither it nor the source says them."""
        seq_len = given.seq_len or (None if claimed.seq_len else self.seq_len)
        k_dim = given.k_dim or (None if claimed.width else self.k_dim)
        scheme = given.scheme or (None if claimed.scheme else self.scheme)
        return replace(given, seq_len=seq_len, k_dim=k_dim, scheme=scheme)

    def require(
        self,
        work: Workload,
        models: Collection[str],
        shape: Shape | None,
        digest: str | None,
        is_dense: bool = False,
    ) -> None:
        """As ``require_fields``; a model that ``is_dense`` has equal numbers by both sketches."""
        theirs = {"seq_len": work.seq_len, "stronger_rng": False, **work.scheme.to_wire()}
        theirs["scheme"] = theirs.pop("name")
        if is_dense and {self.scheme, theirs["scheme"]} <= {*SKETCHES}:
            theirs["scheme"] = self.scheme
        self.require_fields(theirs, models, shape, digest)

    def require_fields(
        self,
        theirs: Mapping[str, object],
        models: Collection[str],
        shape: Shape | None,
        digest: str | None,
    ) -> None:
        """Raise ReportedError, naming the field, unless the figures hold for these artifacts.

        ``theirs`` are the fields of what is judged, ``models`` the names of its model, ``shape``
        and ``digest`` those of its checkpoint. The digests decide where both are known, else the
        shapes, else the names: a served model has other names than its folder.
        """
        for field, value in theirs.items():
            _require(field, getattr(self, field), value, "the artifacts have")
        if None not in {self.weights_digest, digest}:
            _require("weights_digest", self.weights_digest, digest, "the model has")
        elif self.shape is not None and shape is not None:
            for field in {**self.shape, **shape}:
                _require(field, self.shape.get(field), shape.get(field), "the model has")
        else:
            name = self.model if self.model in models else " or ".join(models)
            _require("model", self.model, name, "the model is")

    def require_served(self, dtype: str, kv_dtype: str = KV_AUTO) -> None:
        """Raise ReportedError unless nodes serve, and keep keys, in the dtypes of this file."""
        for field, theirs in (("served_dtype", dtype), ("kv_dtype", kv_dtype)):
            _require(field, getattr(self, field), theirs, "the checkpoint is served with")


def rounded(values: np.ndarray) -> list[float]:
    """``values`` [n] with the digits of a file."""
    return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]


# What two calibrations must have in common to be merged.
_SAME: Final = (
    *("references", "weights_digest", "shape", "served_dtype", "kv_dtype", "scheme"),
    *("stronger_rng", "seq_len", "k_dim", "block_hash", "public_key", "p_mismatch"),
)


def merged(ours: CalibrationFile, added: CalibrationFile) -> CalibrationFile:
    """``ours`` with the populations of ``added``; one that both have is one. It lacks the check.

    Raises ReportedError, naming the field, for a calibration of another model or of other nonces.
    """
    for field in _SAME:
        mine, theirs = getattr(ours, field), getattr(added, field)
        if mine != theirs:
            raise ReportedError(f"{field}: this calibration has {mine}, the added one {theirs}")
    known = {each.facts.name: each for each in ours.populations}
    for each in added.populations:
        twin = known.get(each.facts.name)
        if twin is not None and (each.facts.emulated or each.figures == twin.figures):
            # Of an emulated kernel the one with more nonces stays.
            known[each.facts.name] = max(twin, each, key=lambda of: len(of.figures.lengths))
            continue
        facts = each.facts.named_beside(known)
        known[facts.name] = each.model_copy(update={"facts": facts})
    return ours.model_copy(
        update={
            "populations": list(known.values()),
            "suspects": {**added.suspects, **ours.suspects},
            "dist_threshold": max(ours.dist_threshold, added.dist_threshold),
            "left_out": None,
        }
    )


@dataclass(frozen=True, slots=True)
class GivenThreshold:
    """A threshold that a user gives, and the share of honest vectors beyond it."""

    dist_threshold: float
    p_mismatch: float
    origin = "given as --dist-threshold"


def threshold_of(
    dist_threshold: float | None,
    calibration: Path | None,
    p_mismatch: float | None,
    *,
    needed: bool,
) -> CalibrationFile | GivenThreshold | None:
    """What the three options say. There is no default: a threshold belongs to a model.

    None if nothing is given, and nothing is ``needed``. Raises ReportedError if it is, or both are
    given, for a broken file, and for a ``p_mismatch`` that is not the calibration's.
    """
    if calibration is None:
        if dist_threshold is None:
            if not needed:
                return None
            raise ReportedError(f"no threshold: {HOW_TO_CALIBRATE}")
        rate = NETWORK_P_MISMATCH if p_mismatch is None else p_mismatch
        return GivenThreshold(dist_threshold, rate)
    if dist_threshold is not None:
        raise ReportedError("two thresholds: give --calibration or --dist-threshold, not both")
    measured = CalibrationFile.read(calibration)
    if p_mismatch not in {None, measured.p_mismatch}:
        known = f"{calibration} has {measured.p_mismatch:g}"
        raise ReportedError(f"p_mismatch: {known}; leave --p-mismatch out")
    return measured


def checkpoint_shape(folder: Path) -> dict[str, int] | None:
    """Those of ``SHAPE_FIELDS`` that a checkpoint's ``config.json`` has; None if it has none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
    except (OSError, ValueError, AttributeError):
        # Loading the checkpoint says what is wrong with it.
        return None
    return {name: config[name] for name in SHAPE_FIELDS if name in config} or None


def _require(field: str, ours: object, theirs: object, said: str) -> None:
    if ours != theirs:
        text = f"the calibration has {ours}, {said} {theirs}; write one for what is judged"
        raise ReportedError(f"{field}: {text}")


def calibrated_order(measured: CalibrationFile | None) -> Work:
    """An order of what the calibration holds for, or of what tells most without one."""
    if measured is None:
        return Work("", k_dim=default_k_dim(SKETCH_2), scheme=SKETCH_2)
    return Work(
        model="",
        seq_len=measured.seq_len,
        k_dim=measured.k_dim,
        scheme=measured.scheme,
        stronger_rng=measured.stronger_rng,
    )
