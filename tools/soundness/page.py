"""``docs/soundness.md``: what was tried and what came of it, in figures that were seen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from measuring.results import table
from soundness.results import (
    CellRow,
    cheat_summary,
    convicted_honest,
    forged_summary,
    honest_summary,
    never_convicted,
    summary,
)
from soundness.subjects import BY_NAME
from soundness.trying import Trial

TEXT: Final = Path(__file__).with_suffix(".txt")
UNKNOWN: Final = (
    "GPUs, models of a real size, contexts beyond {longest} tokens, CPUs other than those"
    " named here, kernels that round where none of the emulated ones does, and weights that were"
    " rounded with the help of data (AWQ, GPTQ)."
)


def page(rows: Sequence[CellRow], trial: Trial) -> str:
    """``rows`` are of the models and schemes that were tried, each as ``trial`` says."""
    subjects = [BY_NAME[arch] for arch in dict.fromkeys(row["model"] for row in rows)]
    lengths = dict.fromkeys(f"{each.nonces} of {each.seq_len}" for each in subjects)
    unknown = UNKNOWN.format(longest=max(each.seq_len for each in subjects))
    if left := [f"{each.arch} ({each.what})" for each in BY_NAME.values() if each not in subjects]:
        unknown += f" Of the models that can be tried, these were not: {', '.join(left)}."
    wrong = convicted_honest(rows)
    return TEXT.read_text().format(
        summary=summary(rows) + (f" They are: {'; '.join(wrong)}." if wrong else ""),
        unknown=unknown,
        runs=trial.runs,
        soon=trial.soon,
        runs_of_cheats=trial.runs_of_cheats,
        honest=table(*honest_summary(rows)),
        cheats=table(*cheat_summary(rows)),
        never=never_convicted(rows),
        forged=forged_summary(rows),
        nonces=f"{' or '.join(lengths)} tokens",
        tried=_tried(rows),
        processors="; ".join(sorted({row["processor"] for row in rows if row["processor"]})),
    )


def _tried(rows: Sequence[CellRow]) -> str:
    """On which day and machine each model was tried by each scheme; most of them are the others."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        where = f"{row['date']} on {row['machine']}"
        found.setdefault(where, {})[f"{row['model']} by {row['scheme']}"] = None
    most = max(found, key=lambda where: len(found[where]))
    texts = [f"{', '.join(of)} {where}" for where, of in found.items() if where != most]
    return ", ".join([*texts, f"all {'others ' if texts else ''}{most}"])
