"""Small models, written once and kept in the user's cache folder."""

import hashlib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from proofserve.lab.client.errors import LabError

# What people call the families, beside their exact names.
ALIASES = {"qwen": "qwen3", "gemma": "gemma3"}
# Checkpoints of one seed share every tensor that has a name in common: llama would be qwen without
# its query norms, and a second witness of nothing.
SEEDS = {"qwen3": 0, "llama": 1, "gemma3": 2}


@dataclass(frozen=True, slots=True)
class SmallModel:
    """One of the seeded checkpoints of ``proofserve model new``."""

    arch: str = "qwen3"
    size: str = "tiny"
    seed: int = 0

    @property
    def family(self) -> str:
        """The exact name of the architecture."""
        return ALIASES.get(self.arch, self.arch)

    @property
    def name(self) -> str:
        """The name to serve it under."""
        return f"{self.size}-{self.family}"


def independent(model: SmallModel) -> SmallModel:
    """``model`` with a seed of its architecture's own.

    An architecture that is not on offer is refused when its checkpoint is written.
    """
    return replace(model, seed=SEEDS.get(model.family, 0))


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint on this machine, and what to call it."""

    name: str
    folder: Path


def named(name: str, size: str) -> Model:
    """The small model of an architecture, written if need be, or the checkpoint in a folder.

    Raises LabError for a name that is neither, and ModelError as ``checkpoint``.
    """
    if name in {*ALIASES, *SEEDS}:
        small = independent(SmallModel(name, size))
        return Model(small.name, checkpoint(small))
    if not Path(name).is_dir():
        raise LabError(f"{name!r} is no folder, and none of {', '.join([*ALIASES, *SEEDS])}")
    return Model(Path(name).absolute().name, Path(name))


def checkpoint(model: SmallModel) -> Path:
    """The folder of ``model``, written if it is not there yet.

    Raises ModelError for an architecture or a size that is not on offer.
    """
    # transformers takes seconds to import, which nobody should wait for who asks for --help.
    from proofserve.models import write_model  # noqa: PLC0415

    folder = cache_folder() / f"{model.family}-{model.size}-{model.seed}-{_recipe()}"
    if folder.exists():
        return folder
    try:
        write_model(folder, model.family, model.size, model.seed)
    except OSError:
        # Another process was faster; folders appear complete or not at all.
        if not folder.is_dir():
            raise
    return folder


def cache_folder() -> Path:
    """Where the checkpoints are kept."""
    return Path.home() / ".cache" / "proofserve" / "models"


def _recipe() -> str:
    """Changes with the code that writes checkpoints: an old one must not pass for a new one."""
    files = resources.files("proofserve.models").iterdir()
    sources = sorted((f.name, f.read_bytes()) for f in files if f.name.endswith((".py", ".txt")))
    digest = hashlib.sha256()
    for name, content in sources:
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:8]
