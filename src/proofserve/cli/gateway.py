"""``proofserve gateway``: a bounded queue in front of one or many vLLM servers."""

import inspect
from typing import Any

import typer

from proofserve.cli.setting_options import SettingOptions
from proofserve.settings.gateway import GatewaySettings
from proofserve.wiring.gateway import run_gateway

OPTIONS = SettingOptions(GatewaySettings, lambda name: f"--{name.replace('_', '-')}")


def gateway(**given: Any) -> None:
    """Relay chat to vLLM servers: a bounded queue, timeouts, streams, limits per key.

    \b
    proofserve gateway --backend-url http://127.0.0.1:8001
    proofserve gateway --backend-url http://a:8001*2,http://b:8001 --client-keys-file keys.toml
    VLLM_USE_EMBEDDED_ENGINE=true VLLM_MODEL=Qwen/Qwen3-0.6B proofserve gateway

    Every option has a variable, shown beside it. After SIGTERM the gateway refuses new requests,
    finishes the accepted ones, and ends with exit code 0.
    """
    chosen = OPTIONS.chosen(given)
    try:
        run_gateway(chosen)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


gateway.__signature__ = inspect.Signature(OPTIONS.parameters())  # type: ignore[attr-defined]

# Without the frames of rich, narrow terminals show the names of variables in full.
app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.command()(gateway)
