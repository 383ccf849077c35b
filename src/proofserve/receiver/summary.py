"""The summary as a table for a terminal."""

from datetime import UTC, datetime

from rich.table import Table

from proofserve.receiver.store import Summary

# Fields of a source that have a column each.
_COUNTS = ("artifacts", "winners", "committed", "duplicates", "validations", "frauds")
# Shown only if a source has some: a terminal of 80 columns has no room for all.
_OPTIONAL = ("winners", "committed")


def render(summary: Summary) -> Table:
    """A table of sources, the newest first; times in UTC."""
    # Padding on one side only leaves room for the keys on a terminal of 80 columns.
    table = Table(
        title=_title(summary),
        title_style="bold red" if summary.forks else None,
        title_justify="left",
        expand=True,
        padding=(0, 1, 0, 0),
    )
    # Keys and hashes share the rest of the width and may be cut: their beginnings identify them.
    for name in ("public key", "block"):
        table.add_column(name, ratio=1, overflow="ellipsis", no_wrap=True)
    shown = [
        name
        for name in _COUNTS
        if name not in _OPTIONAL or any(getattr(source, name) for source in summary.sources)
    ]
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("last", no_wrap=True)
    for source in summary.sources:
        counts = [f"{getattr(source, name):,}" for name in shown]
        table.add_row(
            source.public_key,
            source.block_hash,
            *counts,
            _time(source.last_received),
            style="red" if source.frauds else "",
        )
    return table


def _title(summary: Summary) -> str:
    if summary.last_received is None:
        return "nothing received yet"
    forks = f", {summary.forks:,} forks in logs of receipts" if summary.forks else ""
    return (
        f"{summary.callbacks:,} callbacks, {summary.repeats:,} repeated, "
        f"last at {_time(summary.last_received)} UTC{forks}"
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S")
