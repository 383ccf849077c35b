"""``proofserve serve``: the ordinary vLLM server, with proofs."""

from pathlib import Path
from typing import Annotated

import typer

from proofserve.wiring.launch import become, server_command

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
    poc_measure: Annotated[
        bool, typer.Option(help="Open POST /api/v1/pow/measure, the yardstick of `bench`.")
    ] = False,
) -> None:
    """Start vLLM's own server for MODEL; every option not listed here goes to vLLM.

    \b
    proofserve serve Qwen/Qwen3-0.6B --enable-poc --port 8000
    proofserve serve ./model --enable-poc -tp 2 --max-model-len 4096

    Put MODEL first. Times and limits of the proof endpoints come from POC_ variables; the README
    lists them. Where vLLM's own command works, `VLLM_PLUGINS=proofserve POC_ENABLED=1 vllm serve
    MODEL` is the same.
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
    become(server_command(model, ctx.args, poc))
