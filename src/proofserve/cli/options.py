"""Options that several commands share: server, small models, protocol."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from proofserve.cli.model import NAMES
from proofserve.remote.records import AnyWork, DistanceWork, work_of_scheme

Url = Annotated[str | None, typer.Option(help="Use this running server; start none.")]
Name = Annotated[
    str | None, typer.Option("--model", help="With --url: the model's name; the first if unset.")
]


def first_key(keys: str | None) -> str | None:
    return keys and keys.partition(",")[0]


ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="POC_API_KEY", callback=first_key, help="A key of the running node, if it needs one."
    ),
]
SeqLen = Annotated[int, typer.Option(help="Tokens per nonce.", min=1)]
Protocol = Annotated[Literal["artifact", "distance"], typer.Option(help="Of the proofs.")]
Protocols = Annotated[
    Literal["artifact", "distance", "both"], typer.Option("--protocol", help="Of the proofs.")
]
SchemeName = Annotated[
    Literal["artifact-v1", "artifact-v1-layers", "sketch-v1", "sketch-v2"] | None,
    typer.Option("--scheme", help="Of the artifact protocol; the node's default if unset."),
]
Models = Annotated[
    list[str] | None,
    typer.Option("--models", help=f"Small models to serve, some of {' '.join(NAMES)}."),
]
Size = Annotated[str, typer.Option(help="tiny (a few MB) or small (about 100M parameters).")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
Png = Annotated[Path | None, typer.Option("--png", help="Draw histograms to this file.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
ForwardBatch = Annotated[int, typer.Option(help="Nonces per forward.", min=1)]
# In "--models qwen llama" typer passes "llama" on as an extra argument of the command.
SEVERAL = {"allow_extra_args": True}


def chosen(
    ctx: typer.Context, models: list[str] | None, url: str | None, default: list[str]
) -> list[str]:
    """The models of ``--models a b`` or of ``--models a --models b``, or the default."""
    if models and url:
        raise typer.BadParameter("give --models (we start servers) or --url (one runs)")
    if ctx.args and not models:
        raise typer.BadParameter(f"unexpected argument {ctx.args[0]!r}")
    return [*models, *ctx.args] if models else default


def work_of(
    protocol: str, model: str, seq_len: int, batch_size: int = 32, scheme: str | None = None
) -> AnyWork:
    """An order of the protocol; ``scheme`` is for the artifact protocol."""
    if protocol == "distance":
        return DistanceWork(model, seq_len=seq_len, batch_size=batch_size)
    return work_of_scheme(scheme, model, seq_len, batch_size)


def works_of(protocols: str, model: str, seq_len: int, scheme: str | None = None) -> list[AnyWork]:
    names = ("artifact", "distance") if protocols == "both" else (protocols,)
    return [work_of(name, model, seq_len, scheme=scheme) for name in names]
