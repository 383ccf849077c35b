"""``proofserve serve``: the ordinary vLLM server, with proofs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from proofserve.outbox.database import hold_lock
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.settings.node import node_settings
from proofserve.wiring.access import allowlist_of, require_known_callers_of
from proofserve.wiring.launch import exec_server, server_command

app = typer.Typer()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Model name or folder, as vLLM takes it.")],
    enable_poc: Annotated[
        bool, typer.Option("--enable-poc", help="Open the proof endpoints under /api/v1/pow.")
    ] = False,
    poc_scheme: Annotated[
        str,
        typer.Option(
            help="Of the artifact protocol: artifact-v1, or artifact-v1-layers with reflections."
        ),
    ] = "artifact-v1",
    poc_seq_len: Annotated[
        int | None, typer.Option(help="Fix the tokens per nonce; other requests get 409.")
    ] = None,
    poc_k_dim: Annotated[
        int | None, typer.Option(help="Fix the vector's dimensions; other requests get 409.")
    ] = None,
    poc_forward_batch: Annotated[
        int,
        typer.Option(help="Nonces per forward. Chat waits for one forward at most: keep it short."),
    ] = 32,
    poc_share: Annotated[
        float, typer.Option(help="Fraction of engine time for proofs while chat never pauses.")
    ] = 0.0,
    poc_outbox: Annotated[
        Path, typer.Option(help="SQLite file that keeps results until they are delivered.")
    ] = Path("proofserve-outbox.sqlite"),
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the round that ran when the server went down."),
    ] = False,
    poc_api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that may do everything; may be repeated. Better: POC_API_KEY."),
    ] = None,
    poc_viewer_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that may only look; may be repeated. Better: POC_VIEWER_KEY."),
    ] = None,
    poc_api_keys_file: Annotated[
        Path | None, typer.Option(help="TOML file of [[key]]: name, key, role.")
    ] = None,
    poc_allow_anonymous: Annotated[
        bool,
        typer.Option("--poc-allow-anonymous", help="Let everybody operate, without a key."),
    ] = False,
    poc_callback_allow: Annotated[
        list[str] | None,
        typer.Option(
            help="Where callbacks may go: https://host[:port], a network like 10.0.0.0/8, or"
            " loopback, which is the default. May be repeated."
        ),
    ] = None,
    poc_callback_secret: Annotated[
        str | None,
        typer.Option(help="Sign callbacks with it. Better: POC_CALLBACK_SECRET."),
    ] = None,
    poc_measure: Annotated[
        bool, typer.Option(help="Open POST /api/v1/pow/measure, the yardstick of `bench`.")
    ] = False,
) -> None:
    """Start vLLM's own server for MODEL; every option not listed here goes to vLLM.

    \b
    proofserve serve Qwen/Qwen3-0.6B --enable-poc --host 127.0.0.1 --port 8000
    POC_API_KEY=$(openssl rand -hex 32) proofserve serve ./model --enable-poc -tp 2

    Without a key the proof endpoints answer to this machine alone. Put MODEL
    first. Times and limits of the proof endpoints come from POC_ variables;
    docs/operations.md lists them. Where vLLM's own command works,
    `VLLM_PLUGINS=proofserve POC_ENABLED=1 vllm serve MODEL` is the same.
    """
    poc = {
        "POC_ENABLED": "1" if enable_poc else "0",
        "POC_SCHEME": poc_scheme,
        "POC_FORWARD_BATCH": str(poc_forward_batch),
        "POC_SHARE": str(poc_share),
        "POC_OUTBOX": str(poc_outbox.absolute()),
        "POC_RESUME": "1" if resume else "0",
        "POC_MEASURE": "1" if poc_measure else "0",
    }
    if poc_seq_len is not None:
        poc["POC_SEQ_LEN"] = str(poc_seq_len)
    if poc_k_dim is not None:
        poc["POC_K_DIM"] = str(poc_k_dim)
    several = {
        "POC_API_KEY": poc_api_key,
        "POC_VIEWER_KEY": poc_viewer_key,
        "POC_CALLBACK_ALLOW": poc_callback_allow,
    }
    poc |= {name: ",".join(values) for name, values in several.items() if values}
    if poc_callback_secret is not None:
        poc["POC_CALLBACK_SECRET"] = poc_callback_secret
    if poc_api_keys_file is not None:
        poc["POC_API_KEYS_FILE"] = str(poc_api_keys_file.absolute())
    if poc_allow_anonymous:
        poc["POC_ALLOW_ANONYMOUS"] = "1"
    _check(poc, ctx.args)
    exec_server(server_command(model, ctx.args, poc))


def _check(poc: Mapping[str, str], vllm_options: Sequence[str]) -> None:
    """Refuse now what would be refused minutes later, when the model is loaded."""
    try:
        chosen = node_settings(poc)
        require_known_callers_of(chosen, vllm_options)
        allowlist_of(chosen)
        if chosen.enabled:
            hold_lock(chosen.outbox).close()
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        hint = f"--poc-{name.replace('_', '-')} / POC_{name.upper()}"
        raise typer.BadParameter(first["msg"], param_hint=hint) from error
    except (ValueError, OutboxUnavailable) as error:
        raise typer.BadParameter(str(error)) from error
