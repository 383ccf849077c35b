"""``proofserve gateway``: the bounded front door of one or many vLLM servers."""

import inspect
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from proofserve.settings.gateway import PREFIX, GatewaySettings
from proofserve.wiring.gateway import run_gateway


def gateway(**given: Any) -> None:
    """Relay chat to vLLM servers: a bounded queue, timeouts, streams, limits per key.

    \b
    proofserve gateway --backend-url http://127.0.0.1:8001
    proofserve gateway --backend-url http://a:8001*2,http://b:8001 --client-keys-file keys.toml
    VLLM_USE_EMBEDDED_ENGINE=true VLLM_MODEL=Qwen/Qwen3-0.6B proofserve gateway

    Every option has a variable, shown beside it. SIGTERM refuses what is new, finishes what was
    accepted, and ends with exit code 0.
    """
    try:
        run_gateway(GatewaySettings(**given))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise typer.BadParameter(
            first["msg"], param_hint=f"{_flag(name)} / {_variable(name)}"
        ) from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    option = typer.Option(_flag(name), envvar=_variable(name), help=field.description)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=field.default,
        annotation=Annotated[field.annotation, option],
    )


# The options are the settings, told to typer in the way it reads any function. Written by hand,
# two dozen of them would stand in two places and drift apart.
gateway.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_parameter(*item) for item in GatewaySettings.model_fields.items()]
)

# A table would cut the names of variables short on a narrow terminal.
app = typer.Typer(rich_markup_mode=None)
app.command()(gateway)
