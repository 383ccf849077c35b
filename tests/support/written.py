"""Networks of models that were made in memory: they are written, and read from disk."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from proofserve.engines.reference.network import Network, load


def network_from(write: Callable[[Path], object], dtype: str = "float32") -> Network:
    """The network of the checkpoint that ``write`` leaves in a new folder."""
    folder = Path(mkdtemp(dir=_folder().name))
    write(folder)
    return load(folder, dtype, "cpu")


@cache
def _folder() -> TemporaryDirectory[str]:
    """Of this process, and there until it ends: layers are read when a forward comes."""
    return TemporaryDirectory(prefix="proofserve-networks-")
