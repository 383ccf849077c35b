"""Writing a checkpoint: all files into a sibling directory, which then takes the target's name."""

import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from proofserve.models.architectures import architecture, shape
from proofserve.models.tokenizer import build_tokenizer
from proofserve.models.trained import TrainedModel, require_own_tokens
from proofserve.models.weights import seeded_weights

DTYPE: Final = torch.bfloat16
WEIGHTS: Final = "model.safetensors"
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
        (staging / WEIGHTS).write_bytes(blob)
        config.save_pretrained(staging)
        written = _complete(staging, config, build_tokenizer(dimensions.context))
    return ModelSummary(directory, arch, size, _parameters(tensors), written)


def write_trained(directory: Path, model: TrainedModel) -> ModelSummary:
    """Write a trained model, a complete checkpoint in bfloat16, to a new directory.

    The directory appears complete or not at all. Raises DirectoryInUseError as ``write_model``, and
    OtherTokensError if this version of the package tokenizers makes other tokens.
    """
    directory = directory.absolute()
    _refuse_if_in_use(directory)
    with _appearing_at_once(directory) as staging:
        model.copy_weights(staging)
        config = AutoConfig.from_pretrained(staging)
        tokenizer = build_tokenizer(config.max_position_embeddings)
        require_own_tokens(tokenizer)
        written = _complete(staging, config, tokenizer)
        tensors = load((staging / WEIGHTS).read_bytes())
    return ModelSummary(directory, config.model_type, model.name, _parameters(tensors), written)


def _complete(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> int:
    """Write what chat needs beside the weights of ``config``. Returns all bytes of ``folder``."""
    tokens = {name: getattr(config, name) for name in TOKEN_IDS}
    GenerationConfig(**tokens).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.iterdir())


def _parameters(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())
