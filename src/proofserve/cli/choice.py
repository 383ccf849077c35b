"""``--models a b``: which of the small models a command serves."""

from typing import Annotated

import typer

# In "--models qwen llama" the second name reaches us as an argument that nobody asked for.
SEVERAL = {"allow_extra_args": True}

Models = Annotated[
    list[str] | None,
    typer.Option("--models", help="Small models to serve: qwen llama gemma, one or several."),
]


def chosen(
    ctx: typer.Context, models: list[str] | None, url: str | None, default: list[str]
) -> list[str]:
    """The models of ``--models a b`` or of ``--models a --models b``, or the default."""
    if models and url:
        raise typer.BadParameter("give --models (we start servers) or --url (one runs)")
    if ctx.args and not models:
        raise typer.BadParameter(f"unexpected argument {ctx.args[0]!r}")
    return [*models, *ctx.args] if models else default
