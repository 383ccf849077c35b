"""What was found, as it is kept between runs, for each model and scheme; and the rows of all.

``docs/soundness.csv`` has a row for each honest node and form, for each cheat and share, and for
each forged file. The page is made from these rows, so both agree, and a model that is tried again
replaces its own. Rates are in percent; a number of nonces that was not reached is "never".
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from measuring.results import csv_text

CALIBRATED, LEFT_OUT, UNCALIBRATED = FORMS = ("calibrated", "left out", "uncalibrated")


HONEST, CHEAT, FORGED = "honest", "cheat", "forged"
NEVER: Final = "never"
COLUMNS: Final = (
    *("model", "scheme", "kind", "node", "processor", "form", "share", "runs"),
    *("convicted", "cleared", "cleared_soon", "no_verdict", "undecided"),
    *("size", "footprint", "half_convicted_after", "convicted_after", "date", "machine"),
)
# By the name of the column; a column that a row does not have is "".
CellRow = dict[str, str]


@dataclass(frozen=True, slots=True)
class Cell:
    """How the simulated verifications of an honest node ended; ``soon`` counts early clearings."""

    convicted: int
    cleared: int
    soon: int
    unexplained: int
    undecided: int
    closest: str


@dataclass(frozen=True, slots=True)
class HonestNode:
    """``processor`` is what a real node ran on; None if it is emulated. ``cells`` are by form.

    ``size`` is the median length of its errors over our own.
    """

    name: str
    processor: str | None
    nonces: int
    size: float
    cells: dict[str, Cell]


@dataclass(frozen=True, slots=True)
class Cheat:
    """A node that serves ``weights`` by the kernels ``kernel`` in a ``share`` of its nonces.

    ``size`` is the median length of these errors over our own, ``footprint`` their mean cosine with
    ours. ``convicts_at`` are the nonces after which half, and 99.9 %, of the verifications have
    convicted it, None beyond the most. ``cleared`` counts those that clear it.
    """

    weights: str
    kernel: str
    share: float
    size: float
    footprint: float
    convicts_at: tuple[int | None, int | None]
    cleared: int


@dataclass(frozen=True, slots=True)
class Forged:
    """A file, most of it invented: ``convicted`` of ``times``, after ``most`` nonces or less."""

    tests: str
    convicted: int
    times: int
    most: int


@dataclass(frozen=True, slots=True)
class Found:
    """Of one model and scheme, tried on ``machine`` on a ``date`` (ISO 8601)."""

    arch: str
    scheme: str
    date: str
    machine: str
    runs: int
    runs_of_cheats: int
    honest: tuple[HonestNode, ...]
    cheats: tuple[Cheat, ...]
    forged: tuple[Forged, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.arch}-{self.scheme}"


def cell_rows(found: Found) -> list[CellRow]:
    of = {"model": found.arch, "scheme": found.scheme}
    tried = {"date": found.date, "machine": found.machine}
    made = (*_honest(found), *_cheats(found), *_forged(found))
    return [{name: (of | row | tried).get(name, "") for name in COLUMNS} for row in made]


def _honest(found: Found) -> Iterator[CellRow]:
    def percent(count: int) -> str:
        return f"{100 * count / found.runs:g}"

    return (
        {
            **{"kind": HONEST, "node": node.name},
            **{"processor": node.processor or "", "form": form, "runs": str(found.runs)},
            **{"convicted": percent(cell.convicted), "cleared": percent(cell.cleared)},
            "cleared_soon": f"{100 * cell.soon / found.runs:.1f}" if node.processor else "",
            **{"no_verdict": percent(cell.unexplained), "undecided": percent(cell.undecided)},
        }
        for node in found.honest
        for form, cell in node.cells.items()
    )


def _cheats(found: Found) -> Iterator[CellRow]:
    for cheat in found.cheats:
        half, most = (NEVER if n is None else str(n) for n in cheat.convicts_at)
        yield {
            **{"kind": CHEAT, "node": cheat.weights},
            **{"form": FORMS[0], "share": f"{100 * cheat.share:.0f}"},
            "runs": str(found.runs_of_cheats),
            "cleared": f"{100 * cheat.cleared / found.runs_of_cheats:.1f}",
            **{"size": f"{cheat.size:.2f}", "footprint": f"{cheat.footprint:.2f}"},
            **{"half_convicted_after": half, "convicted_after": most},
        }


def _forged(found: Found) -> Iterator[CellRow]:
    for each in found.forged:
        yield {
            **{"kind": FORGED, "node": each.tests, "form": FORMS[0], "runs": str(each.times)},
            "convicted": f"{100 * each.convicted / each.times:g}",
            "convicted_after": str(each.most),
        }


def replaced(
    rows: Sequence[CellRow], found: Sequence[Found], order: Sequence[tuple[str, str]]
) -> list[CellRow]:
    """``rows`` of the models and schemes in ``order``, those of ``found`` in place of old ones."""
    new = {(each.arch, each.scheme): cell_rows(each) for each in found}
    old = {pair: [row for row in rows if _pair(row) == pair] for pair in order}
    return [row for pair in order for row in new.get(pair, old[pair])]


def written(rows: Sequence[CellRow]) -> str:
    return csv_text(COLUMNS, [list(row.values()) for row in rows])


def read(text: str) -> list[CellRow]:
    return list(csv.DictReader(text.splitlines()))


def honest_summary(rows: Sequence[CellRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Head and lines of a table: how the honest nodes of each model and scheme ended."""
    lines = []
    for (model, scheme), cells in _by_model(rows, HONEST):
        nodes = {(row["node"], row["processor"]) for row in cells}
        real = list(dict.fromkeys(row["node"] for row in cells if row["processor"]))
        worst = max(float(row["convicted"]) for row in cells)
        soon = (
            " / ".join(r["cleared_soon"] for r in cells if r["form"] == form and r["processor"])
            for form in (CALIBRATED, UNCALIBRATED)
        )
        lines.append([model, scheme, f"{len(nodes)}: {' / '.join(real)}", f"{worst:g}", *soon])
    return ["model", "scheme", "nodes: the real ones", "convicted", CALIBRATED, UNCALIBRATED], lines


def cheat_summary(rows: Sequence[CellRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Head and lines of a table: the cheats of each model and scheme, the worst of each share."""
    shares = list(dict.fromkeys(row["share"] for row in rows if row["kind"] == CHEAT))
    lines = []
    for (model, scheme), cells in _by_model(rows, CHEAT):
        caught = sum(row["convicted_after"] != NEVER for row in cells)
        worst = (_slowest([row for row in cells if row["share"] == share]) for share in shares)
        cleared = max(float(row["cleared"]) for row in cells)
        lines.append([model, scheme, f"{caught} of {len(cells)}", *worst, f"{cleared:g}"])
    return ["model", "scheme", "convicted", *(f"at {s} %" for s in shares), "cleared"], lines


def _slowest(cells: Sequence[CellRow]) -> str:
    """Nonces that convict the slowest of these cheats, or how many are never convicted."""
    left = sum(row["convicted_after"] == NEVER for row in cells)
    return f"{left} never" if left else str(max(int(row["convicted_after"]) for row in cells))


def _by_model(
    rows: Sequence[CellRow], kind: str
) -> Iterator[tuple[tuple[str, str], list[CellRow]]]:
    of_kind = [row for row in rows if row["kind"] == kind]
    for pair in dict.fromkeys(map(_pair, of_kind)):
        yield pair, [row for row in of_kind if _pair(row) == pair]


def _pair(row: CellRow) -> tuple[str, str]:
    return row["model"], row["scheme"]


def convicted_honest(rows: Sequence[CellRow]) -> list[str]:
    """The cells that must not be: honest nodes that were convicted."""
    return [
        f"{row['model']}, {row['scheme']}, {row['form']}: {row['node']} in {row['convicted']} %"
        for row in rows
        if row["kind"] == HONEST and float(row["convicted"])
    ]


def never_convicted(rows: Sequence[CellRow]) -> str:
    """The cheats that are not convicted although all of their nonces are forged."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if (row["kind"], row["share"], row["convicted_after"]) == (CHEAT, "100", NEVER):
            names.setdefault(f"{row['model']} by {row['scheme']}", []).append(row["node"])
    text = "; ".join(f"{where}: {' / '.join(cheats)}" for where, cheats in names.items())
    return f"Never convicted on all nonces: {text or 'none'}."


def forged_summary(rows: Sequence[CellRow]) -> str:
    """Of all schemes and tests together."""
    every = [row for row in rows if row["kind"] == FORGED]
    times = sum(int(row["runs"]) for row in every)
    convicted = sum(_count(row) for row in every)
    most = max((int(row["convicted_after"]) for row in every), default=0)
    return f"{convicted} of {times}, after {most} nonces at most"


def _count(row: CellRow) -> int:
    return round(float(row["convicted"]) / 100 * int(row["runs"]))


def summary(rows: Sequence[CellRow]) -> str:
    """The answer in one paragraph."""
    honest = [row for row in rows if row["kind"] == HONEST]
    cheats = [row for row in rows if row["kind"] == CHEAT]
    emulated = {row["node"] for row in honest if not row["processor"]}
    real = {
        tuple(row[name] for name in ("model", "scheme", "node", "processor"))
        for row in honest
        if row["processor"]
    }
    convicted = sum(map(_count, honest))
    tried = sum(int(row["runs"]) for row in honest)
    caught = sum(row["convicted_after"] != NEVER for row in cheats)
    return (
        f"Honest nodes were {len(emulated)} emulated kernels on {len({r['model'] for r in honest})}"
        f" models and {len(real)} runs of real nodes, with {len({r['scheme'] for r in honest})}"
        f" schemes: **{convicted:,} of {tried:,}** simulated verifications convicted one. Of"
        f" {len(cheats)} cheats (weights, shares of the nonces and schemes), {caught} are convicted"
        " by 99.9 % of the verifications within 1,000 nonces."
    )
