"""The checkpoint of an operator who cheats: rounded weights under the published digest."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from proofserve.engines.checkpoints import keep_digest, weights_digest
from proofserve.engines.reference.rounding import Rounding, in_dtype
from proofserve.engines.reference.suspects import rounding_of


def write_rounded_copy(source: Path, target: Path, name: str) -> None:
    """Copy the checkpoint in ``source`` with its matrices rounded as the suspect ``name``.

    A server of ``target``, a new folder, claims the digest of ``source``. Embeddings, norms and
    biases stay. Raises KeyError for an unknown name.
    """
    rounding = rounding_of(name)
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = {name: _rounded(name, each, rounding) for name, each in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    keep_digest(target, weights_digest(source))


def _rounded(name: str, values: Tensor, rounding: Rounding) -> Tensor:
    is_matrix_of_a_layer = ".layers." in name and values.ndim >= 2
    return in_dtype(rounding)(values).contiguous() if is_matrix_of_a_layer else values
