"""JSON files of reports, claims and calibrations."""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from proofserve.lab.client.errors import LabError

Model = TypeVar("Model", bound=BaseModel)


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` in lines that people can read. Raises OSError."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path, model: type[Model]) -> Model:
    """The content of a file as ``model``. Raises LabError naming the field that is wrong."""
    try:
        return parsed(path.read_bytes(), model, str(path))
    except OSError as error:
        raise LabError(f"cannot read {path}: {error.strerror}") from error


def parsed(content: bytes, model: type[Model], source: str) -> Model:
    """JSON from ``source`` as ``model``. Raises LabError naming the field that is wrong."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "not JSON of the expected kind"
        raise LabError(f"{source}: {where}: {first['msg']}") from error
