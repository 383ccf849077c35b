"""``proofserve probe``: whether any OpenAI-compatible endpoint serves a checkpoint, unrounded."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from pydantic import Field

from proofserve.cli.command import verdict_command
from proofserve.cli.session import COLOURS, EXIT_CODES, CommandSession
from proofserve.cli.validator.options import ChanceOptions, CheckpointOptions, PageOptions
from proofserve.client.judging import validator_setup
from proofserve.protocol.nonces import fresh_seed
from proofserve.reports import ReportedError
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


class ProbeOptions(CheckpointOptions, ChanceOptions, PageOptions):
    url: Annotated[str, typer.Argument()]
    """The endpoint, with or without /v1."""
    model: Path
    """The checkpoint that it claims to serve."""
    served_model: str | None = None
    """The model's name at the endpoint; the first of /v1/models if unset."""
    api_key: Annotated[str | None, typer.Option(envvar="POC_PROBE_API_KEY")] = None
    """A key of the endpoint."""
    prompts: int = Field(64, ge=1, le=10_000)
    """At most so many prompts."""
    max_tokens: int = Field(64, ge=1, le=4096)
    """Of each answer."""
    concurrency: int = Field(4, ge=1, le=256)
    """Prompts at a time."""
    seed: str | None = None
    """Selects the prompts; a new one if unset. An endpoint must not know it."""
    logprobs: bool = True
    """Ask for log-probabilities."""
    chat: bool = True
    """Ask /chat/completions."""
    completions: bool = True
    """Ask /completions."""
    served_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """What honest servers of this model compute in."""
    alpha: float = ALPHA
    """Chance to convict an honest endpoint."""
    beta: float = BETA
    """Chance to clear a fraudulent endpoint."""


@verdict_command(app, "probe")
def probe_endpoint(given: ProbeOptions, session: CommandSession) -> int:
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
    wanted = ((Kind.CHAT, given.chat), (Kind.COMPLETION, given.completions))
    kinds = tuple(kind for kind, asked in wanted if asked)
    if not kinds:
        raise ReportedError("--no-chat, --no-completions: nothing is left to ask")
    chances = Chances(given.alpha, given.beta)
    answers = given.max_tokens, given.concurrency, given.logprobs
    endpoint = Endpoint(given.url, given.api_key, *answers, session.line)
    session.line.step(f"asking {given.url} for its models")
    name = endpoint.choose_model(given.served_model)
    session.line.step(f"loading {given.model}")
    reader, tokens = _read_by(given)
    if Kind.CHAT in kinds and not tokens.has_chat_template:
        raise ReportedError(f"{given.model} has no chat template; give --no-chat")
    seed = given.seed or fresh_seed()
    asked = tuple(prompts(seed, given.prompts, kinds))
    read = sum(len(tokens.prompt_ids(each.request)) for each in asked)
    session.console.print(
        f"At most {len(asked)} prompts: {read} tokens of prompts, {len(asked) * given.max_tokens}"
        " of answers. It ends sooner if the verdict is certain.",
        soft_wrap=True,
    )
    probing, group = Probing(tokens, reader, chances), max(LEAST_GROUP, given.concurrency)
    found = probe(endpoint, asked, probing, group, session.line)
    setup = {
        **{"url": given.url, "served_model": name, "checkpoint": str(given.model), "seed": seed},
        **given.model_dump(include={"prompts", "max_tokens", "served_dtype", "alpha", "beta"}),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    report = ProbeReport(found, setup, tuple(_notes(endpoint, given.logprobs)))
    session.tell(found.text, f"bold {COLOURS[found.verdict]}")
    for line in report.lines():
        session.tell(line)
    given.write(report.record())
    given.write_page(lambda: page(report))
    return EXIT_CODES[found.verdict]


def _read_by(given: ProbeOptions) -> tuple["CheckpointValidator", "CheckpointTokenizer"]:
    """The checkpoint, to read answers, and its tokens. Raises ReportedError and CheckpointError."""
    setup = validator_setup(given.model, given.device, given.suspect)
    # Its import takes seconds, and --help must not wait for it.
    from proofserve.verifier.validator import CheckpointTokenizer, CheckpointValidator  # noqa: PLC0415

    reader = CheckpointValidator(replace(setup, served_dtype=given.served_dtype))
    if not reader.names:
        raise ReportedError(f"{given.model}: {NO_SUSPECTS}; give --suspect")
    return reader, CheckpointTokenizer(given.model, reader.published.vocabulary)


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
