"""What the commands of ``proofserve bench`` share: options, servers of their own, the report."""

from pathlib import Path
from typing import Annotated

import typer

from proofserve.cli.model import ARCHS, SmallModel, checkpoint
from proofserve.cli.servers import ServedModel, ServerOptions, own_model
from proofserve.cli.session import EXIT_FAILED, CommandSession
from proofserve.lab.report.report import Report

Arch = Annotated[str, typer.Option(help=f"One of {', '.join(ARCHS)}.")]


def small_model(
    small: SmallModel,
    forward_batch: int,
    session: CommandSession,
    *,
    share: float = 0.0,
    receipts: bool = False,
) -> ServedModel:
    """A server of our own with the model ``small``, not started yet."""
    options = ServerOptions(
        checkpoint(small), small.name, forward_batch, measure=True, share=share, receipts=receipts
    )
    return own_model(options, session)


def show(report: Report, file: Path | None, session: CommandSession) -> None:
    """Print ``report`` and write its JSON to ``file``, if there is one."""
    session.console.print(report.table())
    if file is not None:
        report.write(file)
        session.console.print(f"figures written to {file}")


def exit_if_failed(report: Report) -> None:
    """End with exit code 1 if a figure breaks its limit. Raises typer.Exit."""
    if not report.passed:
        raise typer.Exit(EXIT_FAILED)
