"""``proofserve serve``: the ordinary vLLM server, with proofs."""

import inspect
from typing import Annotated, Any, NoReturn

import typer

from proofserve.cli.setting_options import SettingOptions
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.settings.node import NodeSettings
from proofserve.wiring.launch import exec_server, server_command
from proofserve.wiring.start_checks import Check, slow_checks, start_checks

# The exit code of a server that cannot start as the operator asks.
REFUSED = 2
# The errors of checks.
UNFIT = (ValueError, OutboxUnavailable)
SHORT = {"enabled": "--enable-poc", "resume": "--resume"}
OPTIONS = SettingOptions(
    NodeSettings, lambda name: SHORT.get(name, f"--poc-{name.replace('_', '-')}")
)


def serve(
    ctx: typer.Context, model: str | None = None, check_config: bool = False, **given: Any
) -> None:
    """Start vLLM's own server for MODEL; every option not listed here goes to vLLM.

    \b
    proofserve serve Qwen/Qwen3-0.6B --enable-poc --host 127.0.0.1 --port 8000
    POC_API_KEY=$(openssl rand -hex 32) proofserve serve ./model --enable-poc -tp 2

    MODEL comes first. Without a key the proof endpoints answer to this machine
    alone. Every option has a variable, shown beside it. Where vLLM's own
    command works, `VLLM_PLUGINS=proofserve POC_ENABLED=1 vllm serve MODEL` is
    the same server.
    """
    if model is None or model.startswith("-"):
        _refuse("the model comes first: proofserve serve MODEL [OPTIONS]")
    chosen = OPTIONS.chosen(given)
    checks = start_checks(model, chosen, ctx.args)
    if check_config:
        typer.echo(f"settings: {len(given)} are valid")
        raise typer.Exit(_report(checks | slow_checks(model, ctx.args)))
    try:
        for check in checks.values():
            check()
    except UNFIT as error:
        _refuse(str(error))
    exec_server(server_command(model, ctx.args, OPTIONS.variables(given)))


def _report(checks: dict[str, Check]) -> int:
    """Print a line for each check, and return the exit code."""
    code = 0
    for name, check in checks.items():
        try:
            found = check()
        except UNFIT as error:
            found, code = f"FAILED: {error}", REFUSED
        typer.echo(f"{name}: {found}")
    return code


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"proofserve serve: {reason}", err=True)
    raise typer.Exit(REFUSED)


def _parameter(name: str, default: object, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


MODEL = Annotated[str | None, typer.Argument(help="Model name or folder, as vLLM takes it.")]
CHECK_CONFIG = Annotated[
    bool,
    typer.Option(
        "--check-config", help="Load no model: check all this, a line each; exit code 0 or 2."
    ),
]
serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        _parameter("ctx", inspect.Parameter.empty, typer.Context),
        _parameter("model", None, MODEL),
        _parameter("check_config", False, CHECK_CONFIG),
        *OPTIONS.parameters(),
    ]
)

# Without the frames of rich, narrow terminals show the names of variables in full.
app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
