"""``proofserve check``: whether a server does what its documents say."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from proofserve.cli.command import ApiKey, SeqLen, Url
from proofserve.cli.model import SEVERAL, Models, checkpoint_named, chosen_models
from proofserve.cli.servers import ServedModel, ServerOptions, own_model, running_model
from proofserve.cli.session import EXIT_FAILED, CommandSession, open_session
from proofserve.models.trained import DENSE
from proofserve.protocol import SEQ_LEN
from proofserve.remote.records import AnyWork, DistanceWork
from proofserve_lab.check import checks as lab_checks
from proofserve_lab.check.checks import Check, Reporter
from proofserve_lab.check.end_to_end import Trial, artifact_trial, distance_trial, end_to_end
from proofserve_lab.checkpoints import claims_of_model
from proofserve_lab.orders import Protocols, SchemeName, works_of

app = typer.Typer(
    help="Check a server that this command starts, or a running one.\n\nIt starts one with a small"
    " model (--models) or with your checkpoint (--model DIR); --url names a running one.",
    no_args_is_help=True,
)

VERDICTS = {True: "[green]PASS[/green]", False: "[red]FAIL[/red]", None: "[yellow]SKIP[/yellow]"}

ModelOrName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Folder of a checkpoint to serve. With --url: the model's name; the first if unset.",
    ),
]


# Checks one model by an order of each protocol.
ModelCheck = Callable[[ServedModel, Sequence[AnyWork], Reporter], None]


def smoke(subject: ServedModel, works: Sequence[AnyWork], report: Reporter) -> None:
    """Check that proofs are valid and repeatable and depend on the key, and that a round runs.

    \b
    proofserve check smoke
    proofserve check smoke --model ./my-checkpoint
    proofserve check smoke --models qwen llama --protocol distance
    proofserve check smoke --scheme sketch-v2
    proofserve check smoke --url http://127.0.0.1:8000
    """
    with subject.start() as node:
        lab_checks.smoke(node, works, report)


def coexist(subject: ServedModel, works: Sequence[AnyWork], report: Reporter) -> None:
    """Check that chat completes during a round, and that proofs stop for it and resume.

    \b
    proofserve check coexist
    proofserve check coexist --url http://127.0.0.1:8000   (no other chat may run there)
    """
    with subject.start() as node:
        lab_checks.coexist(node, works[0], report)


def e2e(subject: ServedModel, works: Sequence[AnyWork], report: Reporter) -> None:
    """Generate, restart, validate: honest proofs must be accepted, forgeries refused.

    With --url the server is not restarted, and the other checkpoint is not checked.

    \b
    proofserve check e2e
    proofserve check e2e --model ./my-checkpoint
    proofserve check e2e --url http://127.0.0.1:8000
    """
    trials = [_trial(work, subject.folder) for work in works]
    end_to_end(subject.start, subject.folder is not None, trials, report)


def _trial(work: AnyWork, folder: Path | None) -> Trial:
    """A trial; forged claims come from the checkpoint in ``folder`` with other weights."""
    if isinstance(work, DistanceWork):
        return partial(distance_trial, work)
    foreign = None if folder is None else partial(claims_of_model, folder, work, redrawn=True)
    return partial(artifact_trial, work, foreign)


def _command(
    check: ModelCheck, default: Sequence[str] = ("qwen",), artifacts_alone: bool = False
) -> Callable[..., None]:
    """The command of ``check``, whose help it has. ``default`` names the small models to serve.

    A check of ``artifacts_alone`` has no option --protocol.
    """

    def command(
        ctx: typer.Context,
        models: Models = None,
        protocol: Protocols = "artifact" if artifacts_alone else "both",
        url: Url = None,
        api_key: ApiKey = None,
        model: ModelOrName = None,
        seq_len: SeqLen = SEQ_LEN,
        scheme: SchemeName = None,
    ) -> None:
        if url is not None or model is None:
            names = chosen_models(ctx, models, url, [*default])
        elif models or ctx.args:
            raise typer.BadParameter("give --models (small models) or --model (one checkpoint)")
        else:
            names = [model]
        checks = list[Check]()
        with open_session() as session:

            def report(made: Check) -> None:
                checks.append(made)
                text = f"{VERDICTS[made.passed]}  {made.name}  [dim]{escape(made.detail)}[/dim]"
                session.console.print(text, highlight=False, soft_wrap=True)

            for subject in _subjects(names, url, model, api_key, session):
                session.console.print(f"[bold]{escape(subject.name)}[/bold]", highlight=False)
                check(subject, works_of(protocol, subject.name, seq_len, scheme), report)
            failed = sum(made.passed is False for made in checks)
            session.console.print(f"{len(checks)} checks, {failed} failed")
        if failed:
            raise typer.Exit(EXIT_FAILED)

    command.__doc__ = check.__doc__
    if artifacts_alone:
        given = inspect.signature(command).parameters.values()
        kept = [each for each in given if each.name != "protocol"]
        command.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    return command


def _subjects(
    names: Sequence[str],
    url: str | None,
    model: str | None,
    api_key: str | None,
    session: CommandSession,
) -> Iterator[ServedModel]:
    """The ``model`` at ``url``, or a server for each of ``names``."""
    if url is not None:
        yield running_model(url, api_key, model, session)
        return
    for name in names:
        found = checkpoint_named(name, "tiny", session.line.step)
        yield own_model(ServerOptions(found.folder, found.name), session)


app.command("smoke", context_settings=SEVERAL)(_command(smoke))
app.command("coexist", context_settings=SEVERAL)(_command(coexist, artifacts_alone=True))
app.command("e2e", context_settings=SEVERAL)(_command(e2e, (DENSE.name, "qwen", "llama")))
