"""``proofserve check``: does a server keep its promises?"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import typer
from rich.markup import escape

from proofserve.cli.model import SmallModel, checkpoint
from proofserve.cli.options import (
    SEVERAL,
    ApiKey,
    Models,
    Name,
    Protocols,
    SeqLen,
    Url,
    chosen,
    orders,
)
from proofserve.cli.outsider import claims_of_model
from proofserve.cli.servers import ServerOptions, existing_server, serving
from proofserve.cli.session import EXIT_FAILED, CommandSession, open_session
from proofserve.lab.check.checks import Check, Tell
from proofserve.lab.check.coexist import coexist as coexist_checks
from proofserve.lab.check.distance_e2e import distance_trial
from proofserve.lab.check.e2e import CheckStage, StartNode, Trial, artifact_trial, end_to_end
from proofserve.lab.check.smoke import smoke as smoke_checks
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.records import AnyWork, DistanceWork, Work

app = typer.Typer(help="Check a server, one we start or one that runs.", no_args_is_help=True)

FORWARD_BATCH = 8
# Another seed is another model of the same shape.
FOREIGN_SEED = 1
VERDICTS = {True: "[green]PASS[/green]", False: "[red]FAIL[/red]", None: "[yellow]SKIP[/yellow]"}


@dataclass(frozen=True, slots=True)
class CheckedServer:
    """What to check: the server at ``url``, or one of our own for each of ``models``."""

    models: Sequence[str]
    url: str | None
    name: str | None
    api_key: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """One server under check; ``model`` is None for one that somebody else runs."""

    name: str
    start: StartNode
    model: SmallModel | None


@app.command("smoke", context_settings=SEVERAL)
def smoke(
    ctx: typer.Context,
    models: Models = None,
    protocol: Protocols = "both",
    url: Url = None,
    api_key: ApiKey = None,
    model: Name = None,
    seq_len: SeqLen = 256,
) -> None:
    """Proofs are valid and repeatable, another key gives others, a round counts.

    \b
    proofserve check smoke
    proofserve check smoke --models qwen llama --protocol distance
    proofserve check smoke --url http://127.0.0.1:8000
    """

    def check(subject: CheckedModel, tell: Tell) -> None:
        with subject.start() as node:
            smoke_checks(node, orders(protocol, subject.name, seq_len), tell)

    _run(check, CheckedServer(chosen(ctx, models, url, ["qwen"]), url, model, api_key))


@app.command("coexist", context_settings=SEVERAL)
def coexist(
    ctx: typer.Context,
    models: Models = None,
    url: Url = None,
    api_key: ApiKey = None,
    model: Name = None,
    seq_len: SeqLen = 256,
) -> None:
    """Chat completes during a round, proofs give way to it and resume afterwards."""

    def check(subject: CheckedModel, tell: Tell) -> None:
        with subject.start() as node:
            coexist_checks(node, Work(subject.name, seq_len=seq_len), tell)

    _run(check, CheckedServer(chosen(ctx, models, url, ["qwen"]), url, model, api_key))


@app.command("e2e", context_settings=SEVERAL)
def e2e(
    ctx: typer.Context,
    models: Models = None,
    protocol: Protocols = "both",
    url: Url = None,
    api_key: ApiKey = None,
    model: Name = None,
    seq_len: SeqLen = 256,
) -> None:
    """Generate, restart, validate: honest proofs are accepted, forgeries are not."""

    def check(subject: CheckedModel, tell: Tell) -> None:
        works = orders(protocol, subject.name, seq_len)
        trials = [_trial(work, subject.model) for work in works]
        end_to_end(CheckStage(subject.start, subject.model is not None), trials, tell)

    _run(check, CheckedServer(chosen(ctx, models, url, ["qwen", "llama"]), url, model, api_key))


def _trial(work: AnyWork, model: SmallModel | None) -> Trial:
    """Of the server's own ``model``, if we know it, there is another with the same shape."""
    if isinstance(work, DistanceWork):
        return partial(distance_trial, work)
    if model is None:
        return partial(artifact_trial, work, None)
    other = checkpoint(replace(model, seed=FOREIGN_SEED))
    return partial(artifact_trial, work, partial(claims_of_model, other, work))


def _run(check: Callable[[CheckedModel, Tell], None], target: CheckedServer) -> None:
    """Check every subject. Ends with exit code 1 if a check failed."""
    checks: list[Check] = []
    with open_session() as session:

        def tell(made: Check) -> None:
            checks.append(made)
            detail = f"  [dim]{escape(made.detail)}[/dim]"
            text = f"{VERDICTS[made.passed]}  {made.name}{detail}"
            session.console.print(text, highlight=False, soft_wrap=True)

        for subject in _subjects(target, session):
            session.console.print(f"[bold]{escape(subject.name)}[/bold]", highlight=False)
            check(subject, tell)
        failed = sum(made.passed is False for made in checks)
        session.console.print(f"{len(checks)} checks, {failed} failed")
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _subjects(target: CheckedServer, session: CommandSession) -> Iterator[CheckedModel]:
    if target.url is not None:
        with NodeClient(target.url, target.api_key) as node:
            name = target.name or node.models()[0]
        yield CheckedModel(
            name, partial(existing_server, target.url, target.api_key, session), None
        )
        return
    for arch in target.models:
        model = SmallModel(arch)
        deployment = ServerOptions(checkpoint(model), model.name, FORWARD_BATCH)
        yield CheckedModel(model.name, partial(serving, deployment, session), model)
