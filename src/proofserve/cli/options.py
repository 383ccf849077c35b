"""Options that several commands share: server, small models, protocol, threshold."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from proofserve.cli.model import NAMES
from proofserve.protocol import ARTIFACT_K_DIM, SKETCH_K_DIM
from proofserve.remote.records import AnyWork, DistanceWork, work_of_scheme
from proofserve.verifier.calibration_file import NETWORK_P_MISMATCH


def needed_without_plan(ctx: typer.Context, value: str | None) -> str | None:
    if value is None and not ctx.params["plan"]:
        raise typer.BadParameter("it is missing, and only --plan needs none")
    return value


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
KDim = Annotated[
    int | None,
    typer.Option(
        help=f"Values per vector; {ARTIFACT_K_DIM}, or {SKETCH_K_DIM} of a sketch, if unset.", min=1
    ),
]
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
BundleFile = Annotated[
    Path | None,
    typer.Option(
        "--bundle",
        help="Write the verdict with the node's signed answers, for `verify-bundle` by others.",
    ),
]
Png = Annotated[Path | None, typer.Option("--png", help="Draw histograms to this file.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
ForwardBatch = Annotated[int, typer.Option(help="Nonces per forward.", min=1)]
StrongerRng = Annotated[bool, typer.Option(help="256-bit seeds; with artifact-v1-layers.")]
DistThreshold = Annotated[
    float | None,
    typer.Option(help="L2 distance beyond which a vector is a mismatch, measured for this model."),
]
Calibration = Annotated[
    Path | None, typer.Option(help="A file of `calibrate noise --out`; it must be of this model.")
]
References = Annotated[
    list[str] | None,
    typer.Option(
        "--reference",
        help="A node or a file of one that you trust, two or more, in the place of --model.",
    ),
]
SuspectNodes = Annotated[
    list[str] | None,
    typer.Option(
        "--suspect-node",
        help="NAME=URL or NAME=FILE: a node of yours that cheats so; with --reference.",
    ),
]
ReferenceApiKey = Annotated[
    str | None, typer.Option(envvar="POC_REFERENCE_API_KEY", help="A key of those nodes.")
]
Plan = Annotated[
    bool,
    typer.Option(
        "--plan",
        # What only a plan can do without asks whether it is one.
        is_eager=True,
        help="Only say what it will cost here: bytes, memory, time. Writes nothing; a model's"
        " config.json will do.",
    ),
]
Suspects = Annotated[
    list[Path] | None,
    typer.Option(help="A checkpoint that a cheating node may serve, beside the bank of suspects."),
]
LeftOut = Annotated[int, typer.Option(help="Simulated of each kernel that is left out.", min=1)]
BlockHeight = Annotated[
    int | None, typer.Option(help="For sketches, if the source does not say.", min=0)
]
PMismatch = Annotated[
    float | None,
    typer.Option(
        help="Share of honest vectors beyond the threshold;"
        f" the calibration's, or {NETWORK_P_MISMATCH} with --dist-threshold."
    ),
]
Alpha = Annotated[float, typer.Option(help="Chance to convict an honest node.")]
Beta = Annotated[float, typer.Option(help="Chance to clear a fraudulent node.")]
Share = Annotated[
    float, typer.Option(help="Clear only if a node that forges this share would have shown.")
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
