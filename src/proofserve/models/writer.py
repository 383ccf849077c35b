"""Writing a checkpoint: all files into a sibling directory, which then takes the target's name."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save
from transformers import GenerationConfig

from proofserve.models.architectures import architecture, shape
from proofserve.models.tokenizer import build_tokenizer
from proofserve.models.weights import seeded_weights

DTYPE: Final = torch.bfloat16
TOKEN_IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


class DirectoryInUseError(FileExistsError):
    """The target exists and is not an empty directory. It was not touched."""


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What was written: ``parameters`` counts numbers, ``bytes`` all files of the directory."""

    path: Path
    arch: str
    size: str
    parameters: int
    bytes: int


def _refuse_if_in_use(directory: Path) -> None:
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists() or directory.is_symlink():
        raise DirectoryInUseError(
            f"{directory} exists and is not an empty directory; name a new one, or remove it first"
        )


@contextmanager
def _appearing_at_once(directory: Path) -> Iterator[Path]:
    """A hidden sibling of ``directory``: renamed to it at the end, or removed after an error."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    # On the same file system as the target, or the rename would be a copy.
    staging = directory.parent / f".{directory.name}.{uuid.uuid4().hex}"
    staging.mkdir()
    try:
        yield staging
        # Another process may have filled the target meanwhile. The rename would fail then too,
        # but its error would not say what to do.
        _refuse_if_in_use(directory)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_model(directory: Path, arch: str, size: str, seed: int = 0) -> ModelSummary:
    """Write a complete checkpoint, which transformers and vLLM load, to a new directory.

    The same arguments give the same bytes on the same versions of torch, transformers and
    tokenizers. The directory appears complete or not at all.

    Raises:
        UnknownModelError: ``arch`` or ``size`` is unknown.
        DirectoryInUseError: ``directory`` exists and is not an empty directory.
    """
    family, dimensions = architecture(arch), shape(size)
    directory = directory.absolute()
    _refuse_if_in_use(directory)
    config = family.config(dimensions)
    config.architectures = [family.class_name]
    config.dtype = DTYPE
    with _appearing_at_once(directory) as staging:
        tensors = dict(seeded_weights(family, config, seed, DTYPE))
        # Not by safetensors' own writer: only the owner can read its files. transformers reads
        # from the metadata which framework's layout the tensors have.
        blob = save(tensors, metadata={"format": "pt"})
        (staging / "model.safetensors").write_bytes(blob)
        config.save_pretrained(staging)
        tokens = {name: getattr(config, name) for name in TOKEN_IDS}
        GenerationConfig(**tokens).save_pretrained(staging)
        build_tokenizer(dimensions.context).save_pretrained(staging)
        written = sum(file.stat().st_size for file in staging.iterdir())
    parameters = sum(tensor.numel() for tensor in tensors.values())
    return ModelSummary(directory, arch, size, parameters, written)
