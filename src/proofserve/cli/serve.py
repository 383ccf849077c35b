"""``proofserve serve`` and ``proofserve gateway``: servers whose options are their settings."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NoReturn, TypeVar, get_args, get_origin

import annotated_types as bounds
import typer
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from proofserve.rounds.errors import OutboxUnavailable
from proofserve.settings.gateway import GatewaySettings
from proofserve.settings.node import NodeSettings
from proofserve.wire.records import first_problem
from proofserve.wiring.experts import asked_experts
from proofserve.wiring.gateway import run_gateway
from proofserve.wiring.launch import exec_server, server_command
from proofserve.wiring.start_checks import slow_checks, slow_dtype, start_checks

S = TypeVar("S", bound=BaseSettings)
C = TypeVar("C", bound=Callable[..., None])

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


@dataclass(frozen=True, slots=True)
class SettingOptions(Generic[S]):
    """The options of a command: one for each field of ``settings``, named by ``flag``."""

    settings: type[S]
    flag: Callable[[str], str] = lambda name: f"--{name.replace('_', '-')}"

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """In the order of options: first those that these settings do not share with others."""
        found, own = self.settings.model_fields, self.settings.__annotations__
        return {name: found[name] for name in sorted(found, key=lambda name: name not in own)}

    def variable(self, name: str) -> str:
        return f"{self.settings.model_config['env_prefix']}{name.upper()}"

    def variables(self, given: dict[str, Any]) -> dict[str, str]:
        """The environment variables with the values of the options."""
        return {
            self.variable(name): str(int(value) if isinstance(value, bool) else value)
            for name, value in _joined(given).items()
        }

    def chosen(self, given: dict[str, Any]) -> S:
        """Raises typer.BadParameter, which names option, variable and allowed range."""
        try:
            return self.settings(**_joined(given))
        except ValidationError as error:
            field, message = first_problem(error)
            name = field.partition(".")[0]
            limits = allowed(self.settings.model_fields[name])
            text = f"{message} (allowed: {limits})" if limits else message
            hint = f"{self.flag(name)} / {self.variable(name)}"
            raise typer.BadParameter(text, param_hint=hint) from error

    def given_to(self, command: C) -> C:
        """``command``, which takes any keywords, with its own parameters and the options."""
        *own, _ = inspect.signature(command).parameters.values()
        first = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        options = [self._parameter(*item) for item in self.fields.items()]
        command.__signature__ = inspect.Signature([*first, *options])  # type: ignore[attr-defined]
        return command

    def _parameter(self, name: str, field: FieldInfo) -> inspect.Parameter:
        annotation, default, text = field.annotation, field.default, field.description
        variable: str | None = self.variable(name)
        if get_origin(annotation) is tuple:
            # The settings read the variable and split it at commas; click would split at spaces.
            text = f"{text}  [env var: {variable}]"
            annotation, default, variable = list[str] | None, None, None
        elif SecretStr in get_args(annotation):
            annotation = str | None
        option = typer.Option(self.flag(name), envvar=variable, help=text)
        kind, marked = inspect.Parameter.KEYWORD_ONLY, Annotated[annotation, option]
        return inspect.Parameter(name, kind, default=default, annotation=marked)


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


def _joined(given: dict[str, Any]) -> dict[str, Any]:
    """The values of options that have one; a list becomes one text with commas."""
    texts = {n: ",".join(v) if isinstance(v, list) else v for n, v in given.items()}
    return {name: value for name, value in texts.items() if value not in (None, "")}


def allowed(field: FieldInfo) -> str:
    """The range of a field in words; empty without one."""
    limits = {bounds.Ge: "at least", bounds.Gt: "more than", bounds.Le: "at most"}
    words = [
        f"{words} {getattr(limit, kind.__name__.lower()):g}"
        for limit in field.metadata
        for kind, words in limits.items()
        if isinstance(limit, kind)
    ]
    return " and ".join(words)


# Without rich's frames, narrow terminals show the names of variables in full.
app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    NODE_OPTIONS.given_to(serve)
)
gateway_app = typer.Typer(rich_markup_mode=None, add_completion=False)
gateway_app.command()(GATEWAY_OPTIONS.given_to(gateway))
