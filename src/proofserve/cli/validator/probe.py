"""``proofserve probe``: whether any OpenAI-compatible endpoint serves a checkpoint, unrounded."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from proofserve.cli import options
from proofserve.cli.session import EXIT_NO_VERDICT, VerdictCommand, open_session
from proofserve.cli.validator.verify import COLOURS, EXIT_CODES
from proofserve.client.checkpoint import validator_setup
from proofserve.protocol.nonces import fresh_seed
from proofserve.reports import ReportedError, write_json
from proofserve.verifier.error_judges import NO_SUSPECTS
from proofserve.verifier.judges import ALPHA, BETA, Chances
from proofserve.verifier.probe.endpoint import Endpoint, Kind
from proofserve.verifier.probe.probing import Probing, probe, prompts
from proofserve.verifier.probe.report import ProbeReport, page

if TYPE_CHECKING:
    from proofserve.verifier.validator import CheckpointTokenizer, CheckpointValidator

app = typer.Typer()

# Prompts are asked in groups of at least so many, of which one is of each sort.
LEAST_GROUP: Final = 4
MOST_PROMPTS: Final = 10_000
SERVED_DTYPES: Final = ("bfloat16", "float16")


@app.command("probe", cls=VerdictCommand)
def command(
    url: Annotated[str, typer.Argument(help="The endpoint, with or without /v1.")],
    model: Annotated[Path, typer.Option(help="The checkpoint that it claims to serve.")],
    served_model: Annotated[
        str | None,
        typer.Option(help="The model's name at the endpoint; the first of /v1/models if unset."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="POC_PROBE_API_KEY", help="A key of the endpoint.")
    ] = None,
    number: Annotated[
        int, typer.Option("--prompts", help="At most so many prompts.", min=1, max=MOST_PROMPTS)
    ] = 64,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.", min=1, max=4096)] = 64,
    concurrency: Annotated[int, typer.Option(help="Prompts at a time.", min=1, max=256)] = 4,
    seed: Annotated[
        str | None,
        typer.Option(help="Selects the prompts; a new one if unset. An endpoint must not know it."),
    ] = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs/--no-logprobs", help="Ask for log-probabilities.")
    ] = True,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Ask /chat/completions.")] = True,
    completions: Annotated[
        bool, typer.Option("--completions/--no-completions", help="Ask /completions.")
    ] = True,
    suspect: options.Suspects = None,
    served_dtype: Annotated[
        str, typer.Option(help="What honest servers of this model compute in: bfloat16 or float16.")
    ] = SERVED_DTYPES[0],
    device: options.Device = "cpu",
    alpha: Annotated[float, typer.Option(help="Chance to convict an honest endpoint.")] = ALPHA,
    beta: Annotated[float, typer.Option(help="Chance to clear a fraudulent endpoint.")] = BETA,
    json: options.Json = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the evidence as a web page to this file.")
    ] = None,
) -> None:
    """Ask any OpenAI-compatible endpoint, and say whether it serves this checkpoint.

    The endpoint needs to know nothing of proofserve. The verdict is one of:
    honest; quantised, with the rounding that explains the answers; another
    model; or cannot tell, with an estimate of how many more prompts it takes.

    Exit code 0: honest. 1: quantised, or another model. 2: cannot tell.
    3: no verdict: an option, the endpoint or the checkpoint is wrong.

    Log-probabilities tell most: 4 to 16 prompts are enough, for weights in 8
    bits too. An endpoint that gives none shows another model and, after more
    prompts, weights in 4 bits; weights in 8 bits may take thousands.

    It reads every answer once itself, and again with suspected weights.

    \b
    proofserve probe http://server:8000 --model ./model
    export POC_PROBE_API_KEY=$(cat provider.key)
    proofserve probe https://provider.example/v1 --model ./model --served-model NAME
        --html probe.html
    proofserve probe http://server:8000 --model ./model --suspect ./model-awq --no-chat
    """
    with open_session(EXIT_NO_VERDICT) as session, session.interrupts.allowed():
        wanted = ((Kind.CHAT, chat), (Kind.COMPLETION, completions))
        kinds = tuple(kind for kind, asked in wanted if asked)
        if not kinds:
            raise ReportedError("--no-chat, --no-completions: nothing is left to ask")
        chances = Chances(alpha, beta)
        endpoint = Endpoint(url, api_key, max_tokens, concurrency, logprobs, session.line)
        session.line.step(f"asking {url} for its models")
        name = endpoint.choose_model(served_model)
        session.line.step(f"loading {model}")
        reader, tokens = _read_by(model, served_dtype, device, suspect)
        if Kind.CHAT in kinds and not tokens.has_chat_template:
            raise ReportedError(f"{model} has no chat template; give --no-chat")
        seed = seed or fresh_seed()
        asked = tuple(prompts(seed, number, kinds))
        read = sum(len(tokens.prompt_ids(each.request)) for each in asked)
        session.console.print(
            f"At most {len(asked)} prompts: {read} tokens of prompts, {len(asked) * max_tokens} of"
            " answers. It ends sooner if the verdict is certain.",
            soft_wrap=True,
        )
        probing = Probing(tokens, reader, chances)
        found = probe(endpoint, asked, probing, max(LEAST_GROUP, concurrency), session.line)
        setup = {
            **{"url": url, "served_model": name, "checkpoint": str(model), "seed": seed},
            **{"prompts": number, "max_tokens": max_tokens, "served_dtype": served_dtype},
            **{"alpha": alpha, "beta": beta},
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        report = ProbeReport(found, setup, tuple(_notes(endpoint, logprobs)))
        session.tell(found.text, f"bold {COLOURS[found.verdict]}")
        for line in report.lines():
            session.tell(line)
        if json is not None:
            write_json(json, report.record())
        if html is not None:
            html.write_text(page(report), encoding="utf-8")
    raise typer.Exit(EXIT_CODES[found.verdict])


def _read_by(
    model: Path, served_dtype: str, device: str, suspects: Sequence[Path] | None
) -> tuple["CheckpointValidator", "CheckpointTokenizer"]:
    """The checkpoint, to read answers, and its tokens. Raises ReportedError and CheckpointError."""
    setup = replace(validator_setup(model, device, suspects), served_dtype=served_dtype)
    # Its import takes seconds, and --help must not wait for it.
    from proofserve.verifier.validator import CheckpointTokenizer, CheckpointValidator  # noqa: PLC0415

    if served_dtype not in SERVED_DTYPES:
        known = " or ".join(SERVED_DTYPES)
        raise ReportedError(
            f"--served-dtype: servers do not compute in {served_dtype}; give {known}"
        )
    reader = CheckpointValidator(setup)
    if not reader.names:
        raise ReportedError(f"{model}: {NO_SUSPECTS}; give --suspect")
    return reader, CheckpointTokenizer(model, reader.published.vocabulary)


def _notes(endpoint: Endpoint, logprobs: bool) -> Iterator[str]:
    for kind, extras in endpoint.settled.items():
        if logprobs and not extras.top:
            yield f"{kind}: the endpoint gives no log-probabilities"
        if not extras.more_fields:
            yield (
                f"{kind}: the endpoint refuses top_k, min_p and repetition_penalty, and may have"
                " its own: sampled tokens that are too likely do not count against it"
            )
    for kind, reason in endpoint.refused.items():
        yield f"{kind}: {reason}"
    if endpoint.limit.waited_s:
        yield f"the endpoint asked to wait for {endpoint.limit.waited_s:.0f} s in all"
