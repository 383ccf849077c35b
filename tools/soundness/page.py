"""``docs/soundness.md``: what was tried and what came of it, in figures that were seen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from measuring.results import table
from soundness.results import (
    CHEAT,
    NEVER,
    CellRow,
    Found,
    cell_rows,
    cheat_summary,
    honest_summary,
    summary,
)
from soundness.subjects import BY_NAME

TEXT: Final = Path(__file__).with_suffix(".txt")
UNKNOWN: Final = (
    "GPUs, models of a real size, contexts beyond {longest} tokens, CPUs other than those"
    " named here, kernels that round where none of the emulated ones does, and weights that were"
    " rounded with the help of data (AWQ, GPTQ)."
)


def page(found: Sequence[Found], machine: str) -> str:
    """``found`` are the models and schemes that were tried."""
    rows = cell_rows(found)
    lengths = {f"{max(n.nonces for n in f.honest)} of {f.seq_len}": 0 for f in found}
    arches = list(dict.fromkeys(each.arch for each in found))
    wrong = convicted_honest(found)
    processors = {row["processor"] for row in rows if row["processor"]}
    return TEXT.read_text().format(
        summary=summary(rows) + (f" They are: {'; '.join(wrong)}." if wrong else ""),
        unknown=_unknown(found),
        runs=found[0].runs,
        soon=found[0].soon,
        runs_of_cheats=found[0].runs_of_cheats,
        honest=table(*honest_summary(rows)),
        cheats=table(*cheat_summary(rows)),
        never=never_convicted(rows),
        forged=_forged(found),
        nonces=f"{' or '.join(lengths)} tokens",
        models=", ".join(f"{arch} ({BY_NAME[arch].what})" for arch in arches),
        machine=machine,
        processors="; ".join(sorted(processors)),
    )


def _unknown(found: Sequence[Found]) -> str:
    """Also which of the models have not been run."""
    text = UNKNOWN.format(longest=max(each.seq_len for each in found))
    done = {each.arch for each in found}
    left = [f"{arch} ({subject.what})" for arch, subject in BY_NAME.items() if arch not in done]
    if left:
        text += f" Of the models that can be tried, these were not: {', '.join(left)}."
    return text


def convicted_honest(found: Sequence[Found]) -> list[str]:
    """The cells that must not be: honest nodes that were convicted."""
    return [
        f"{each.arch}, {each.scheme}, {form}: {node.name} in {node.cells[form].convicted:,}"
        for each in found
        for node in each.honest
        for form in node.cells
        if node.cells[form].convicted
    ]


def never_convicted(rows: Sequence[CellRow]) -> str:
    """The cheats that are not convicted although all of their nonces are forged."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if (row["kind"], row["share"], row["convicted_after"]) == (CHEAT, "100", NEVER):
            names.setdefault(f"{row['model']} by {row['scheme']}", []).append(row["node"])
    text = "; ".join(f"{where}: {' / '.join(cheats)}" for where, cheats in names.items())
    return f"Never convicted on all nonces: {text or 'none'}."


def _forged(found: Sequence[Found]) -> str:
    """Of all schemes and tests together."""
    every = [one for each in found for one in each.forged]
    convicted, times = (sum(getattr(one, name) for one in every) for name in ("convicted", "times"))
    most = max((one.most for one in every), default=0)
    return f"{convicted} of {times}, after {most} nonces at most"
