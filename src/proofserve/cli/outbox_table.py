"""What an outbox holds, as tables for a terminal."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from proofserve.outbox.statistics import OutboxStatistics, RoundStatistics, TargetStatistics

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def render(found: OutboxStatistics) -> Iterator[RenderableType]:
    """A line about the file, its targets, its newest rounds."""
    yield Text(
        f"{found.results:,} results of {found.rounds:,} rounds"
        f" ({found.bytes:,} bytes, schema version {found.schema_version})"
    )
    if found.deleted_results:
        yield Text(f"{found.deleted_results:,} more results were delivered and then deleted")
    if found.uncut_rounds:
        yield Text(f"{found.uncut_rounds:,} rounds have results that are in no callback yet")
    if found.targets:
        yield _targets(found.targets)
    else:
        yield Text("no callbacks")
    if found.newest_rounds:
        yield _rounds(found.newest_rounds)


def _targets(targets: tuple[TargetStatistics, ...]) -> Table:
    table = _table("callbacks to")
    for name in ("pending", "failing", "delivered", "expired"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for one in targets:
        table.add_row(
            escape(one.origin),
            *(f"{count:,}" for count in (one.pending, one.failing, one.delivered, one.expired)),
            escape("\n".join(_remarks(one))),
            style="red" if one.expired else "",
        )
    return table


def _rounds(rounds: tuple[RoundStatistics, ...]) -> Table:
    table = _table("newest rounds")
    table.add_column("scheme", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("results", justify="right", no_wrap=True)
    for one in rounds:
        state = "open" if one.open else "closed"
        table.add_row(escape(one.round_id), one.scheme, state, f"{one.results:,}")
    return table


def _table(first: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    # Names are for the next command: folded where there is no room, never cut.
    table.add_column(first, overflow="fold")
    return table


def _remarks(target: TargetStatistics) -> Iterator[str]:
    if target.oldest_pending_s is not None and target.next_attempt_s is not None:
        yield f"oldest {_span(target.oldest_pending_s)}"
        yield f"next in {_span(target.next_attempt_s)}"
    if target.last_error is not None:
        yield target.last_error


def _span(seconds: float) -> str:
    for unit_s, unit in _UNITS:
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"
