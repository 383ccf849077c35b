"""Reads a TOML file into a model; an error names the file and the field, never a value."""

import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

M = TypeVar("M", bound=BaseModel)


class TomlTable(BaseModel):
    """A table of a file with keys: no unknown field, and no value in an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def read_toml(file: Path, model: type[M]) -> M:
    """The content of ``file``. Raises ValueError if it cannot be read or is not valid."""
    try:
        return model.model_validate(tomllib.loads(file.read_text("utf-8")))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    except ValidationError as error:
        field, message = first_problem(error)
        raise ValueError(f"{file}: {field}: {message}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not TOML: {error}") from error


def first_problem(error: ValidationError) -> tuple[str, str]:
    """The first wrong field, as names with dots between them, and what is wrong with it."""
    first = error.errors()[0]
    return ".".join(map(str, first["loc"])), first["msg"]
