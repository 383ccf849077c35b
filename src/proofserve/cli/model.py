"""``proofserve model``, and the small checkpoints in the user's cache for other commands."""

import hashlib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from proofserve.lab.client.errors import LabError

# Short names of the architectures.
ALIASES = {"qwen": "qwen3", "gemma": "gemma3"}
# Two checkpoints with one seed have equal tensors under equal names. With the seed of qwen, llama
# would be qwen without its query norms, and a check of llama would show nothing new.
SEEDS = {"qwen3": 0, "llama": 1, "gemma3": 2}

app = typer.Typer()


@app.callback()
def _group() -> None:
    """Make small checkpoints with seeded weights, which load like any other."""


@app.command("new")
def new(
    directory: Annotated[Path, typer.Argument(help="A new folder, or an empty one.")],
    arch: Annotated[str, typer.Option(help="qwen3, llama or gemma3.")] = "qwen3",
    size: Annotated[str, typer.Option(help="tiny (a few MB), small (100M) or 0.6b.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Another seed gives other weights.")] = 0,
) -> None:
    """Write a checkpoint with seeded random weights in which every layer matters.

    \b
    proofserve model new ./tiny --arch qwen3 --size tiny
    proofserve serve ./tiny --enable-poc --enforce-eager --max-model-len 2048
    """
    # This import takes seconds and needs the extra `models`; the other commands need neither.
    from proofserve.models.writer import write_model  # noqa: PLC0415

    console = Console()
    try:
        with console.status(f"writing {arch} {size} to {directory} ..."):
            summary = write_model(directory, arch, size, seed)
    except (ValueError, FileExistsError) as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(2) from error
    console.print(
        f"{summary.path}: {summary.arch} {summary.size}, "
        f"{summary.parameters / 1e6:.1f}M parameters, {summary.bytes / 1e6:.1f} MB"
    )


@dataclass(frozen=True, slots=True)
class SmallModel:
    arch: str = "qwen3"
    size: str = "tiny"
    seed: int = 0

    @property
    def family(self) -> str:
        return ALIASES.get(self.arch, self.arch)

    @property
    def name(self) -> str:
        return f"{self.size}-{self.family}"


def independent(model: SmallModel) -> SmallModel:
    """``model`` with the seed of its architecture.

    ``checkpoint`` refuses an unknown architecture.
    """
    return replace(model, seed=SEEDS.get(model.family, 0))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    name: str
    folder: Path


def checkpoint_named(name: str, size: str) -> Checkpoint:
    """The small model of an architecture, written if it is missing, or the checkpoint in a folder.

    Raises LabError for any other name, and UnknownModelError as ``checkpoint``.
    """
    if name in {*ALIASES, *SEEDS}:
        small = independent(SmallModel(name, size))
        return Checkpoint(small.name, checkpoint(small))
    if not Path(name).is_dir():
        raise LabError(f"{name!r} is not a folder, and not one of {', '.join([*ALIASES, *SEEDS])}")
    return Checkpoint(Path(name).absolute().name, Path(name))


def checkpoint(model: SmallModel) -> Path:
    """The folder of ``model``, written if it is missing.

    Raises UnknownModelError for an unknown architecture or size.
    """
    # transformers takes seconds to import, and --help must not wait for it.
    from proofserve.models.writer import write_model  # noqa: PLC0415

    folder = cache_folder() / f"{model.family}-{model.size}-{model.seed}-{_recipe()}"
    if folder.exists():
        return folder
    try:
        write_model(folder, model.family, model.size, model.seed)
    except OSError:
        # Another process may have written it first; folders appear only when they are complete.
        if not folder.is_dir():
            raise
    return folder


def cache_folder() -> Path:
    return Path.home() / ".cache" / "proofserve" / "models"


def _recipe() -> str:
    """A digest of the code that writes checkpoints: a checkpoint of older code is not used."""
    files = resources.files("proofserve.models").iterdir()
    sources = sorted((f.name, f.read_bytes()) for f in files if f.name.endswith((".py", ".txt")))
    digest = hashlib.sha256()
    for name, content in sources:
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:8]
