"""``proofserve check``: whether a server does what its documents say."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from proofserve.cli.model import checkpoint_named
from proofserve.cli.options import (
    SEVERAL,
    ApiKey,
    Models,
    Protocols,
    SchemeName,
    SeqLen,
    Url,
    chosen,
    works_of,
)
from proofserve.cli.recompute import claims_of_model
from proofserve.cli.servers import ServedModel, ServerOptions, own_model, running_model
from proofserve.cli.session import EXIT_FAILED, open_session
from proofserve.lab import checks as lab_checks
from proofserve.lab.checks import Check, Reporter
from proofserve.lab.end_to_end import Trial, artifact_trial, distance_trial, end_to_end
from proofserve.lab.records import AnyWork, DistanceWork, work_of_scheme
from proofserve.models.trained import DENSE
from proofserve.protocol import SEQ_LEN

app = typer.Typer(
    help="Check a server: one that this command starts with a small model (--models) or with your"
    " checkpoint (--model DIR), or a running one (--url).",
    no_args_is_help=True,
)

FORWARD_BATCH = 8
VERDICTS = {True: "[green]PASS[/green]", False: "[red]FAIL[/red]", None: "[yellow]SKIP[/yellow]"}

ModelOrName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Folder of a checkpoint to serve. With --url: the model's name; the first if unset.",
    ),
]


@app.command("smoke", context_settings=SEVERAL)
def smoke(
    ctx: typer.Context,
    models: Models = None,
    protocol: Protocols = "both",
    url: Url = None,
    api_key: ApiKey = None,
    model: ModelOrName = None,
    seq_len: SeqLen = SEQ_LEN,
    scheme: SchemeName = None,
) -> None:
    """Check that proofs are valid and repeatable and depend on the key, and that a round runs.

    \b
    proofserve check smoke
    proofserve check smoke --model ./my-checkpoint
    proofserve check smoke --models qwen llama --protocol distance
    proofserve check smoke --scheme sketch-v2
    proofserve check smoke --url http://127.0.0.1:8000
    """

    def check(subject: ServedModel, report: Reporter) -> None:
        with subject.start() as node:
            lab_checks.smoke(node, works_of(protocol, subject.name, seq_len, scheme), report)

    _run(check, ctx, models, model, url, api_key)


@app.command("coexist", context_settings=SEVERAL)
def coexist(
    ctx: typer.Context,
    models: Models = None,
    url: Url = None,
    api_key: ApiKey = None,
    model: ModelOrName = None,
    seq_len: SeqLen = SEQ_LEN,
    scheme: SchemeName = None,
) -> None:
    """Check that chat completes during a round, and that proofs stop for it and resume.

    \b
    proofserve check coexist
    proofserve check coexist --url http://127.0.0.1:8000   (no other chat may run there)
    """

    def check(subject: ServedModel, report: Reporter) -> None:
        with subject.start() as node:
            lab_checks.coexist(node, work_of_scheme(scheme, subject.name, seq_len), report)

    _run(check, ctx, models, model, url, api_key)


@app.command("e2e", context_settings=SEVERAL)
def e2e(
    ctx: typer.Context,
    models: Models = None,
    protocol: Protocols = "both",
    url: Url = None,
    api_key: ApiKey = None,
    model: ModelOrName = None,
    seq_len: SeqLen = SEQ_LEN,
    scheme: SchemeName = None,
) -> None:
    """Generate, restart, validate: honest proofs must be accepted, forgeries refused.

    With --url the server is not restarted, and the other checkpoint is not checked.

    \b
    proofserve check e2e
    proofserve check e2e --model ./my-checkpoint
    proofserve check e2e --url http://127.0.0.1:8000
    """

    def check(subject: ServedModel, report: Reporter) -> None:
        works = works_of(protocol, subject.name, seq_len, scheme)
        trials = [_trial(work, subject.folder) for work in works]
        end_to_end(subject.start, subject.folder is not None, trials, report)

    _run(check, ctx, models, model, url, api_key, (DENSE.name, "qwen", "llama"))


def _trial(work: AnyWork, folder: Path | None) -> Trial:
    """A trial; forged claims come from the checkpoint in ``folder`` with other weights."""
    if isinstance(work, DistanceWork):
        return partial(distance_trial, work)
    foreign = None if folder is None else partial(claims_of_model, folder, work, redrawn=True)
    return partial(artifact_trial, work, foreign)


def _run(
    check: Callable[[ServedModel, Reporter], None],
    ctx: typer.Context,
    models: list[str] | None,
    model: str | None,
    url: str | None,
    api_key: str | None,
    default: Sequence[str] = ("qwen",),
) -> None:
    """Check ``model`` at ``url``, or start a server for each of ``models`` or for one checkpoint.

    Ends with exit code 1 if a check failed.
    """
    checks: list[Check] = []
    if url is not None or model is None:
        names = chosen(ctx, models, url, [*default])
    elif models or ctx.args:
        raise typer.BadParameter("give --models (small models) or --model (one checkpoint)")
    else:
        names = [model]
    with open_session() as session:

        def report(made: Check) -> None:
            checks.append(made)
            detail = f"  [dim]{escape(made.detail)}[/dim]"
            text = f"{VERDICTS[made.passed]}  {made.name}{detail}"
            session.console.print(text, highlight=False, soft_wrap=True)

        if url is not None:
            subjects: Iterable[ServedModel] = [running_model(url, api_key, model, session)]
        else:
            # Lazily: each checkpoint is written just before its server starts.
            named = (checkpoint_named(name, "tiny") for name in names)
            subjects = (
                own_model(ServerOptions(each.folder, each.name, FORWARD_BATCH), session)
                for each in named
            )
        for subject in subjects:
            session.console.print(f"[bold]{escape(subject.name)}[/bold]", highlight=False)
            check(subject, report)
        failed = sum(made.passed is False for made in checks)
        session.console.print(f"{len(checks)} checks, {failed} failed")
    if failed:
        raise typer.Exit(EXIT_FAILED)
