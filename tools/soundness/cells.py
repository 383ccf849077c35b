"""``docs/soundness.csv``: a row for each honest node and form, and for each cheat and share.

The page's tables are computed from these rows, so the page and the file agree. Rates are in
percent; a number of nonces that was not reached is "never".
"""

import csv
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Final

from soundness.results import FORMS, Cheat, Found, HonestNode

HONEST, CHEAT = "honest", "cheat"
NEVER: Final = "never"
COLUMNS: Final = (
    *("model", "scheme", "kind", "node", "processor", "form", "share", "runs"),
    *("convicted", "cleared", "cleared_soon", "no_verdict", "undecided"),
    *("size", "footprint", "half_convicted_after", "convicted_after"),
)
# By the name of the column; a column that a row does not have is "".
CellRow = dict[str, str]


def cell_rows(found: Sequence[Found]) -> list[CellRow]:
    made = [row for each in found for row in (*_honest(each), *_cheats(each))]
    return [{name: row.get(name, "") for name in COLUMNS} for row in made]


def _honest(found: Found) -> Iterator[CellRow]:
    def percent(count: int) -> str:
        return f"{100 * count / found.runs:g}"

    def row(node: HonestNode, form: str) -> CellRow:
        cell = node.cells[form]
        real = node.processor is not None
        return {
            **{"model": found.arch, "scheme": found.scheme, "kind": HONEST, "node": node.name},
            **{"processor": node.processor or "", "form": form, "runs": str(found.runs)},
            "convicted": percent(cell.convicted),
            "cleared": percent(cell.cleared),
            "cleared_soon": f"{100 * cell.soon / found.runs:.1f}" if real else "",
            "no_verdict": percent(cell.unexplained),
            "undecided": percent(cell.undecided),
        }

    return (row(node, form) for node in found.honest for form in node.cells)


def _cheats(found: Found) -> Iterator[CellRow]:
    def row(cheat: Cheat) -> CellRow:
        half, most = (NEVER if n is None else str(n) for n in cheat.convicts_at)
        return {
            **{"model": found.arch, "scheme": found.scheme, "kind": CHEAT, "node": cheat.weights},
            **{"form": FORMS[0], "share": f"{100 * cheat.share:.0f}"},
            "runs": str(found.runs_of_cheats),
            "cleared": f"{100 * cheat.cleared / found.runs_of_cheats:.1f}",
            **{"size": f"{cheat.size:.2f}", "footprint": f"{cheat.footprint:.2f}"},
            **{"half_convicted_after": half, "convicted_after": most},
        }

    return (row(cheat) for cheat in found.cheats)


def written(rows: Sequence[CellRow]) -> str:
    text = StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read(text: str) -> list[CellRow]:
    return list(csv.DictReader(StringIO(text)))


def honest_summary(rows: Sequence[CellRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Head and lines of a table: how the honest nodes of each model and scheme ended."""
    lines = []
    for (model, scheme), cells in _by_model(rows, HONEST):
        nodes = {(row["node"], row["processor"]) for row in cells}
        real = list(dict.fromkeys(row["node"] for row in cells if row["processor"]))
        worst = max(float(row["convicted"]) for row in cells)
        soon = (_soon(cells, form) for form in FORMS)
        lines.append([model, scheme, f"{len(nodes)}: {' / '.join(real)}", f"{worst:g}", *soon])
    return ["model", "scheme", "nodes: the real ones", "convicted", *FORMS], lines


def _soon(cells: Sequence[CellRow], form: str) -> str:
    own = (row["cleared_soon"] for row in cells if row["form"] == form and row["processor"])
    return " / ".join(own)


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
    for key in dict.fromkeys((row["model"], row["scheme"]) for row in of_kind):
        yield key, [row for row in of_kind if (row["model"], row["scheme"]) == key]


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
    convicted = sum(round(float(row["convicted"]) / 100 * int(row["runs"])) for row in honest)
    tried = sum(int(row["runs"]) for row in honest)
    caught = sum(row["convicted_after"] != NEVER for row in cheats)
    return (
        f"Honest nodes were {len(emulated)} emulated kernels on {len({r['model'] for r in honest})}"
        f" models and {len(real)} runs of real nodes, with {len({r['scheme'] for r in honest})}"
        f" schemes: **{convicted:,} of {tried:,}** simulated verifications convicted one. Of"
        f" {len(cheats)} cheats (weights, shares of the nonces and schemes), {caught} are convicted"
        " by 99.9 % of the verifications within 1,000 nonces."
    )
