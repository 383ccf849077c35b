"""``proofserve serve`` and ``proofserve gateway``: servers whose options are their settings."""

from typing import Annotated, Any, NoReturn

import typer

from proofserve.cli.command import SettingOptions
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.settings.gateway import GatewaySettings
from proofserve.settings.node import NodeSettings
from proofserve.wiring.experts import asked_experts
from proofserve.wiring.gateway import run_gateway
from proofserve.wiring.launch import exec_server, server_command
from proofserve.wiring.start_checks import slow_checks, slow_dtype, start_checks

# The exit code of a server that a check keeps from starting.
REFUSED = 2
# Errors of a failed check.
CHECK_ERRORS = (ValueError, OutboxUnavailable)
SHORT = {
    "enabled": "--enable-poc",
    "receipts": "--receipts",
    "receipts_k_dim": "--receipts-k-dim",
    "resume": "--resume",
}


NODE_OPTIONS = SettingOptions(
    NodeSettings, lambda name: SHORT.get(name, f"--poc-{name.replace('_', '-')}")
)
GATEWAY_OPTIONS = SettingOptions(GatewaySettings)


def serve(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(help="Model name or folder, as for vLLM.")] = None,
    check_config: Annotated[
        bool,
        typer.Option(
            "--check-config",
            help="Only check the configuration, one line per check; exit code 0 or 2.",
        ),
    ] = False,
    capability: Annotated[
        str | None,
        typer.Option(
            "--capability",
            help="For --check-config: of the card that will serve, such as 9.0. Unset: of this"
            " machine's.",
        ),
    ] = None,
    **given: Any,
) -> None:
    """Start vLLM's own server for MODEL. Options that are not listed here go to vLLM.

    \b
    proofserve serve Qwen/Qwen3-0.6B --enable-poc --host 127.0.0.1 --port 8000
    POC_API_KEY=$(openssl rand -hex 32) proofserve serve ./model --enable-poc -tp 2

    MODEL must come first. Without a key, only clients on this machine may call
    the proof endpoints. Every option has a variable, shown beside it. If vLLM's
    own command works, `VLLM_PLUGINS=proofserve POC_ENABLED=1 vllm serve MODEL`
    starts the same server.
    """
    if model is None or model.startswith("-"):
        _refuse("the model must come first: proofserve serve MODEL [OPTIONS]")
    chosen = NODE_OPTIONS.chosen(given)
    if capability and not check_config:
        _refuse("--capability is for --check-config; a server asks its own card")
    checks = start_checks(model, chosen, ctx.args, capability)
    if check_config:
        typer.echo(f"settings: {len(given)} are valid")
        code = 0
        for name, check in (checks | slow_checks(model, chosen, ctx.args)).items():
            try:
                found = check()
            except CHECK_ERRORS as error:
                found, code = f"FAILED: {error}", REFUSED
            typer.echo(f"{name}: {found}")
        raise typer.Exit(code)
    try:
        for check in checks.values():
            check()
    except CHECK_ERRORS as error:
        _refuse(str(error))
    if advice := slow_dtype(model, ctx.args):
        typer.echo(f"proofserve serve: {advice}", err=True)
    options = list(ctx.args)
    if chosen.enabled and (asked := asked_experts(model, options, chosen.scheme)).options:
        typer.echo(f"proofserve serve: {asked}", err=True)
        options += asked.options
    exec_server(server_command(model, options, NODE_OPTIONS.variables(given)))


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"proofserve serve: {reason}", err=True)
    raise typer.Exit(REFUSED)


def gateway(**given: Any) -> None:
    """Relay chat to vLLM servers: a bounded queue, timeouts, streams, limits per key.

    \b
    proofserve gateway --backend-url http://127.0.0.1:8001
    proofserve gateway --backend-url http://a:8001*2,http://b:8001 --client-keys-file keys.toml
    proofserve gateway --backend-url dns:http://vllm.models.svc:8000
    VLLM_USE_EMBEDDED_ENGINE=true VLLM_MODEL=Qwen/Qwen3-0.6B proofserve gateway

    Every option has a variable, shown beside it. After SIGTERM the gateway refuses new requests,
    finishes the accepted ones, and ends with exit code 0.
    """
    chosen = GATEWAY_OPTIONS.chosen(given)
    try:
        run_gateway(chosen)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


# Without rich's frames, narrow terminals show the names of variables in full.
app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    NODE_OPTIONS.given_to(serve)
)
gateway_app = typer.Typer(rich_markup_mode=None, add_completion=False)
gateway_app.command()(GATEWAY_OPTIONS.given_to(gateway))
