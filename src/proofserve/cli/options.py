"""Options that several commands share: server, small models, protocol, threshold."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from proofserve.lab.calibrate.calibration_file import NETWORK_P_MISMATCH
from proofserve.lab.client.records import AnyWork, DistanceWork, Work

Url = Annotated[str | None, typer.Option(help="A server that runs already, instead of our own.")]
Name = Annotated[
    str | None, typer.Option("--model", help="With --url: the model's name, if not its first.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="POC_API_KEY",
        # A server's variable may list several keys.
        callback=lambda keys: keys and keys.partition(",")[0],
        help="A key of the node that runs already, if it asks for one.",
    ),
]
SeqLen = Annotated[int, typer.Option(help="Tokens per nonce.", min=1)]
Protocol = Annotated[Literal["artifact", "distance"], typer.Option(help="Which proofs.")]
Protocols = Annotated[
    Literal["artifact", "distance", "both"], typer.Option("--protocol", help="Which proofs.")
]
Models = Annotated[
    list[str] | None,
    typer.Option("--models", help="Small models to serve: qwen llama gemma, one or several."),
]
Size = Annotated[str, typer.Option(help="tiny (a few MB) or small (about 100M parameters).")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
Png = Annotated[Path | None, typer.Option("--png", help="Draw histograms to this file.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
ForwardBatch = Annotated[int, typer.Option(help="Nonces per forward.", min=1)]
StrongerRng = Annotated[bool, typer.Option(help="With artifact-v1-layers.")]
DistThreshold = Annotated[
    float | None,
    typer.Option(help="L2 distance beyond which a vector is a mismatch, measured for this model."),
]
Calibration = Annotated[
    Path | None,
    typer.Option(help="Or the file of `calibrate noise --out`, which is checked to fit."),
]
PMismatch = Annotated[
    float | None,
    typer.Option(
        help="Share of honest vectors beyond the threshold;"
        f" the calibration's, or {NETWORK_P_MISMATCH} with --dist-threshold."
    ),
]
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


def order(protocol: str, model: str, seq_len: int, batch_size: int = 32) -> AnyWork:
    kind = DistanceWork if protocol == "distance" else Work
    return kind(model, seq_len=seq_len, batch_size=batch_size)


def orders(protocols: str, model: str, seq_len: int) -> list[AnyWork]:
    names = ("artifact", "distance") if protocols == "both" else (protocols,)
    return [order(name, model, seq_len) for name in names]
