"""``nodes.toml`` of ``proofserve validate``: nodes, models, and how often."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from proofserve.protocol import DEFAULT_SCHEME, SKETCHES, default_k_dim
from proofserve.remote.records import Work
from proofserve.reports import ReportedError
from proofserve.settings.node import TomlTable, read_toml
from proofserve.settings.process import variable
from proofserve.verifier.calibration_file import CalibrationFile, calibrated_order
from proofserve.verifier.nodes.sources import NodeSource
from proofserve.verifier.validation.judging import ValidatedModel, ValidatedNode
from proofserve.verifier.validation.run import ValidationPlan
from proofserve.web import http_parts

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def _duration(text: object) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text) if isinstance(text, str) else None
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r} is no time such as 60s, 90m, 6h or 1d")
    return float(found[1]) * _SECONDS[found[2]]


def _url(text: str) -> str:
    if http_parts(text) is None:
        raise ValueError(f"{text!r} is no URL like http://host:8000")
    return text.rstrip("/")


def _from_folder(path: Path, info: ValidationInfo) -> Path:
    return (info.context or Path()) / path


# As the file is read: paths in it are from its own folder.
FilePath = Annotated[Path, AfterValidator(_from_folder)]
Duration = Annotated[float, BeforeValidator(_duration)]
Url = Annotated[str, AfterValidator(_url)]
# Names of nodes are parts of file names and labels of metrics.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Chance = Annotated[float, Field(gt=0.0, lt=1.0)]


class ValidateTable(TomlTable):
    ledger: FilePath = Field(Path("ledger.sqlite"), validate_default=True)
    alpha: Chance = 1e-4
    beta: Chance = 1e-3
    share: float = Field(0.3, gt=0.0, le=1.0)
    every: Duration = 86_400.0
    nonces: int = Field(100, ge=1, le=10_000)
    deadline: Duration = 60.0
    page: FilePath | None = None
    metrics: FilePath | None = None
    bundles: FilePath | None = None


class KeyedTable(TomlTable):
    """The key is in a variable or a file, and never in this one."""

    key_env: str | None = None
    key_file: FilePath | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_key_inside(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and not given.keys().isdisjoint({"key", "api_key"}):
            raise ValueError("a key does not belong into this file: give key_env or key_file")
        return given

    def key(self, where: str) -> str | None:
        """Raises ValueError naming the field."""
        if self.key_env is not None and self.key_file is not None:
            raise ValueError(f"{where}.key_env, key_file: give one of the two")
        if self.key_env is not None:
            if not (found := variable(self.key_env)):
                raise ValueError(f"{where}.key_env: the variable {self.key_env} is not set")
            return found
        if self.key_file is None:
            return None
        try:
            found = self.key_file.read_text("utf-8").strip()
        except OSError as error:
            raise ValueError(f"{where}.key_file: {error.filename}: {error.strerror}") from error
        if not found:
            raise ValueError(f"{where}.key_file: {self.key_file} is empty")
        return found


class ModelTable(KeyedTable):
    checkpoint: FilePath | None = None
    calibration: FilePath | None = None
    suspects: tuple[FilePath, ...] = ()
    references: tuple[Url, ...] = ()
    scheme: str | None = None
    seq_len: int | None = Field(None, ge=1)
    device: str = "cpu"
    forward_batch: int = Field(8, ge=1)

    @model_validator(mode="after")
    def _one_judge(self) -> Self:
        if (self.checkpoint is None) is not bool(self.references):
            raise ValueError("give checkpoint = FOLDER, or references = [NODE, NODE, NODE]")
        if len(self.references) == 1:
            raise ValueError("references: two at least, as one has no other to be near")
        for name in ("calibration", "suspects"):
            if self.references and getattr(self, name):
                raise ValueError(f"{name}: it is about a checkpoint, and references have none")
        if self.calibration is not None and (self.scheme or self.seq_len):
            raise ValueError("scheme, seq_len: the calibration says them; leave them out")
        return self


class NodeTable(KeyedTable):
    url: Url
    model: str
    public_key: str | None = Field(None, pattern="^[0-9a-f]{64}$")


class NodesFile(TomlTable):
    # Named as its table is.
    validate_: ValidateTable = Field({}, alias="validate", validate_default=True)
    models: dict[Name, ModelTable] = Field(min_length=1)
    nodes: dict[Name, NodeTable] = Field(min_length=1)


def validation_plan(file: Path) -> ValidationPlan:
    """The plan in ``file``.

    Raises ValueError naming the table and field, also for a key, a calibration or a checkpoint
    that is not there.
    """
    read = read_toml(file, NodesFile)
    nodes, models = defaultdict[str, list[ValidatedNode]](list), []
    try:
        _require_nodes(read)
        for name, node in read.nodes.items():
            key = node.key(f"nodes.{name}")
            nodes[node.model].append(ValidatedNode(name, node.url, key, node.public_key))
        for name, model in read.models.items():
            models.append(_model(name, model, nodes[name]))
    except (ValueError, ReportedError, OSError) as error:
        raise ValueError(f"{file}: {error}") from error
    of = read.validate_
    paths = of.bundles, of.page, of.metrics
    for path in (of.ledger, *filter(None, paths)):
        if not path.parent.is_dir():
            raise ValueError(f"{file}: validate: the folder {path.parent} is not there")
    numbers = of.alpha, of.beta, of.share, of.every, of.nonces, of.deadline
    return ValidationPlan(tuple(models), of.ledger, *numbers, *paths)


def _require_nodes(read: NodesFile) -> None:
    urls: dict[str, str] = {}
    for name, node in read.nodes.items():
        if node.model not in read.models:
            raise ValueError(f"nodes.{name}.model: there is no [models.{node.model}]")
        if (other := urls.setdefault(node.url, name)) != name:
            raise ValueError(f"nodes.{name}.url: nodes.{other} has the same")
        if node.url in read.models[node.model].references:
            raise ValueError(f"nodes.{name}.url: it is a reference of its model, and no own judge")


def _model(name: str, table: ModelTable, nodes: Sequence[ValidatedNode]) -> ValidatedModel:
    where = f"models.{name}"
    key = table.key(where)
    for field, paths in (("checkpoint", [table.checkpoint]), ("suspects", table.suspects)):
        for path in filter(None, paths):
            if not (path / "config.json").is_file():
                raise ValueError(f"{where}.{field}: {path} has no config.json")
    try:
        measured = CalibrationFile.read(table.calibration) if table.calibration else None
    except ReportedError as error:
        raise ValueError(f"{where}.calibration: {error}") from error
    return ValidatedModel(
        name,
        _shape(calibrated_order(measured), table, where),
        tuple(nodes),
        measured=measured,
        references=tuple(NodeSource(url, url, key) for url in table.references),
        **table.model_dump(
            include={"checkpoint", "calibration", "suspects", "device", "forward_batch"}
        ),
    )


def _shape(usual: Work, table: ModelTable, where: str) -> Work:
    made = replace(usual, seq_len=table.seq_len or usual.seq_len)
    if table.scheme is None:
        return made
    if table.scheme not in (known := (*SKETCHES, DEFAULT_SCHEME)):
        raise ValueError(f"{where}.scheme: choose from {', '.join(known)}")
    return replace(made, scheme=table.scheme, k_dim=default_k_dim(table.scheme))
