"""``proofserve outbox``: a node's results and callbacks, while the node runs or not."""

import json as json_format
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console, JustifyMethod, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from proofserve.outbox.offline import document, origin_of, read_statistics, reading, rows, writing
from proofserve.outbox.offline import prune as prune_file
from proofserve.outbox.offline import retry as make_due
from proofserve.rounds.errors import RoundsError
from proofserve.settings.node import NodeSettings
from proofserve.wire.records import result_record

# The exit code of a command that failed.
FAILED = 2
DAY_S = 86_400.0

File = Annotated[
    Path, typer.Option("--outbox", envvar="POC_OUTBOX", help="The server's outbox file.")
]
DEFAULT = NodeSettings.model_fields["outbox"].default
Round = Annotated[str | None, typer.Option("--round", help="The id of the only round to use.")]

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))

app = typer.Typer(
    help="Show, resend, export and delete a node's results; also while it runs.",
    no_args_is_help=True,
)


@app.command()
def status(
    outbox: File = DEFAULT,
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show the numbers of results and rounds, and callbacks by target.

    \b
    proofserve outbox status
    proofserve outbox status --outbox outbox.sqlite --json

    pending: not delivered yet; failing: pending after failed attempts.
    expired: failed too often; `proofserve outbox retry --expired` sends them again.
    Reads the whole file to find damage: about a second per gigabyte.
    """
    with _printed_errors(), reading(outbox) as connection:
        connection.execute("BEGIN")
        found = read_statistics(connection, time.time())
    if json:
        typer.echo(json_format.dumps(found, indent=2))
        return
    console = Console()
    for part in _render(found):
        console.print(part)


@app.command()
def retry(
    outbox: File = DEFAULT,
    target: Annotated[
        str | None, typer.Option(help="The only target to use, like http://10.0.0.5:9000.")
    ] = None,
    round_: Round = None,
    expired: Annotated[
        bool, typer.Option("--expired", help="Also callbacks that expired.")
    ] = False,
) -> None:
    """Make pending callbacks due now: all of them, or those of a target or round.

    \b
    proofserve outbox retry
    proofserve outbox retry --expired --target http://10.0.0.5:9000

    A running server sends them within 5 s, a stopped one when it starts.
    Key, sequence and body stay, so a receiver recognises a repeated callback.
    The count of failures begins at 0 again.
    """
    origin = None if target is None else origin_of(target)
    if target is not None and origin is None:
        raise typer.BadParameter(
            f"{target!r} is not an address like http://10.0.0.5:9000", param_hint="--target"
        )
    with _printed_errors(), writing(outbox) as connection:
        pending, revived = make_due(connection, time.time(), origin, round_, expired)
    typer.echo(f"{pending + revived} callbacks are due now, {revived} had expired")


@app.command()
def prune(
    outbox: File = DEFAULT,
    older_than_days: Annotated[
        float, typer.Option(help="Delete what was delivered before so many days.", min=0)
    ] = NodeSettings.model_fields["outbox_keep_days"].default,
) -> None:
    """Delete delivered results and callbacks, and make the file smaller.

    \b
    proofserve outbox prune
    proofserve outbox prune --older-than-days 7

    A running server does this itself every hour, with POC_OUTBOX_KEEP_DAYS.
    Pending and expired callbacks and their results are never deleted. Results
    of a round without a callback URL count as delivered when it ends.
    """
    with _printed_errors():
        deleted = prune_file(outbox, time.time() - older_than_days * DAY_S)
    typer.echo(
        f"deleted {deleted.results:,} results, {deleted.callbacks:,} delivered callbacks"
        f" and {deleted.rounds:,} rounds"
    )


@app.command()
def export(
    outbox: File = DEFAULT,
    output: Annotated[
        Path | None, typer.Option(help="The file to create; stdout if unset.")
    ] = None,
    round_: Round = None,
    after: Annotated[
        int, typer.Option(help="Only results above this seq.", min=0, max=2**63 - 1)
    ] = 0,
    for_verify: Annotated[
        bool,
        typer.Option(
            "--for-verify", help="Write one JSON document for `proofserve verify`; needs --round."
        ),
    ] = False,
) -> None:
    """Write results as JSON, one on each line, in the form of GET /results.

    \b
    proofserve outbox export --after 12000 > results.jsonl
    proofserve outbox export --round ID --for-verify --output artifacts.json
    proofserve verify artifacts.json --model ./model --calibration calibration.json

    Writes all results in the file, also those of delivered and expired callbacks.
    """

    if for_verify and round_ is None:
        raise typer.BadParameter("needs --round", param_hint="--for-verify")
    with _printed_errors(), reading(outbox) as connection, _sink(output) as sink:
        if for_verify and round_ is not None:
            sink.writelines(document(connection, round_, after))
            return
        count = 0
        for row in rows(connection, after, round_):
            sink.write(f"{json_format.dumps(result_record(row))}\n")
            count, after = count + 1, row.seq
        typer.echo(f"{count} results; continue later with --after {after}", err=True)


@contextmanager
def _printed_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        # The reader of our output, `head` say, has closed it.
        raise
    except (RoundsError, ValueError, OSError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(FAILED) from error


@contextmanager
def _sink(output: Path | None) -> Iterator[TextIO]:
    """The output. After an error an incomplete file is removed."""
    if output is None:
        yield sys.stdout
        return
    with output.open("x", encoding="utf-8") as file:
        try:
            yield file
        except BaseException:
            output.unlink()
            raise


def _render(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield Text(
        f"{found['results']:,} results of {found['rounds']:,} rounds"
        f" ({found['bytes']:,} bytes, schema version {found['schema_version']})"
    )
    if deleted := found["deleted_results"]:
        yield Text(f"{deleted:,} more results were delivered and then deleted")
    if uncut := found["uncut_rounds"]:
        yield Text(f"{uncut:,} rounds have results that are in no callback yet")
    yield _targets(found["targets"]) if found["targets"] else Text("no callbacks")
    if rounds := found["newest_rounds"]:
        table = _table("newest rounds", scheme="left", state="left", results="right")
        for one in rounds:
            state = "open" if one["open"] else "closed"
            table.add_row(escape(one["round_id"]), one["scheme"], state, f"{one['results']:,}")
        yield table


def _targets(targets: Sequence[Mapping[str, Any]]) -> Table:
    counted: dict[str, JustifyMethod] = dict.fromkeys(
        ("pending", "failing", "delivered", "expired"), "right"
    )
    table = _table("callbacks to", **counted)
    table.add_column("")
    for one in targets:
        counts = (f"{one[name]:,}" for name in counted)
        remarks = []
        if one["oldest_pending_s"] is not None and one["next_attempt_s"] is not None:
            remarks.append(f"oldest {_span(one['oldest_pending_s'])}")
            remarks.append(f"next in {_span(one['next_attempt_s'])}")
        if one["last_error"] is not None:
            remarks.append(one["last_error"])
        style = "red" if one["expired"] else ""
        table.add_row(escape(one["origin"]), *counts, escape("\n".join(remarks)), style=style)
    return table


def _table(first: str, **others: JustifyMethod) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    # Users copy these names into commands: they are wrapped, never cut.
    table.add_column(first, overflow="fold")
    for name, justify in others.items():
        table.add_column(name, justify=justify, no_wrap=True)
    return table


def _span(seconds: float) -> str:
    for unit_s, unit in _UNITS:
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"
