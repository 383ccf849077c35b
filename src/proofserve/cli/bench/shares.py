"""``proofserve bench chat-priority --share``: one server after the other, each with its share."""

from pathlib import Path

import typer

from proofserve.cli.bench.running import exit_if_failed, show, small_model
from proofserve.cli.model import SmallModel
from proofserve.cli.session import open_session
from proofserve.lab.bench.share import (
    MeasuredShare,
    ShareLoad,
    SharePlan,
    measure_share,
    share_report,
)
from proofserve.lab.client.records import Work
from proofserve.lab.report.machine import machine

# By the model's size: nonces per forward. A stream waits for whole forwards, so they are shorter
# than those of the other benchmarks: about 0.1 s.
FORWARDS = {"tiny": 32, "small": 2}


def refuse_other_options(url: str | None, model: str | None, chats: int | None) -> None:
    """Raises typer.BadParameter for options that have no meaning with ``--share``."""
    if url is not None:
        raise typer.BadParameter(
            "--share needs a server with that share, and the one at --url has the share that it "
            "was started with. Leave out --url, and servers are started here, one for each share."
        )
    if model is not None:
        raise typer.BadParameter("--model needs --url; with --share give --size and --arch")
    if chats is not None:
        raise typer.BadParameter("--chats has no meaning with --share: its chats never end")


def bench_shares(
    shares: list[float],
    small: SmallModel,
    work: Work,
    load: ShareLoad,
    forward_batch: int | None,
    file: Path | None,
) -> None:
    """Measure each share on a server of its own. Ends with exit code 1 if a limit is broken."""
    plan, measured = SharePlan(work, load), list[MeasuredShare]()
    where: dict[str, str | int] = {}
    batch = forward_batch or FORWARDS["small" if small.size == "small" else "tiny"]
    with open_session() as session:
        for share in dict.fromkeys(shares):
            with small_model(small, batch, session, share=share).start() as node:
                measured.append(measure_share(node, share, plan, session.line))
                where = {**machine(), **node.versions()}
        report = share_report(plan, measured, where)
        show(report, file, session)
    exit_if_failed(report)
