"""``docs/models.md``: the results of all candidates as two tables, and how to read them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from families.candidates import CANDIDATES, FAMILIES, FORMATS, Candidate
from families.results import Judged, Row
from families.trial import BANK, CALIBRATED, JUDGED, ONE, ROUNDED, SEQ_LEN, TWO
from measuring.results import table
from proofserve.engines.reference.suspects import FP8_CACHE
from proofserve.protocol.verdict.counting import SequentialResult

TEXT: Final = Path(__file__).with_suffix(".txt")
STEPS: Final = ("smoke", "e2e", "coexist", "chat", "receipts")
FAMILY_HEAD: Final = (
    *("family", "built like", "scheme", "passed"),
    *("honest, 1 rank", "honest, 2 ranks", "int4 g128", "distances", "errors"),
)
FORMAT_HEAD: Final = (
    *("weights, cache", "as", "smoke"),
    *("honest", "honest, transformers", "cheat", "errors"),
)
WORDS: Final = {SequentialResult.HONEST: "cleared", SequentialResult.FRAUD: "convicted"}
NONE: Final = "-"
YES: Final = "yes"


def page(found: Mapping[str, Row]) -> str:
    """The text of the page; ``found`` holds rows by the names of their candidates."""
    families = [_family(each, found.get(name)) for name, each in FAMILIES.items()]
    formats = [_format(each, found.get(name)) for name, each in FORMATS.items()]
    reasons = [
        f"- {n}: {text}." for n, each in CANDIDATES.items() if (text := _reason(each, found))
    ]
    versions = sorted({row.vllm for row in found.values() if row.vllm})
    return TEXT.read_text().format(
        families=table(FAMILY_HEAD, families),
        formats=table(FORMAT_HEAD, formats),
        reasons="\n".join(reasons),
        versions=", ".join(versions) or "(none yet)",
        machines=" or ".join(sorted({row.machine for row in found.values()})),
        seq_len=SEQ_LEN,
        judged=len(JUDGED),
        calibrated=len(CALIBRATED),
        bank=BANK,
    )


def wrong(candidate: Candidate, row: Row | None) -> list[str]:
    """What did not go as it should, a line each."""
    if row is None:
        return [f"{candidate.name}: not run"]
    lines = [f"{step} ended: {text}" for step, text in row.errors.items()]
    lines += [
        f"{step}: {made.name}: {made.detail}"
        for step, made_in_it in row.checks.items()
        for made in made_in_it
        if made.passed is False
    ]
    for each in row.judged:
        cheats = each.node == candidate.cheat
        expected = SequentialResult.FRAUD if cheats else SequentialResult.HONEST
        # Whether a cache in 8 bits shows is a finding of the table.
        if each.verdict != expected and each.node != FP8_CACHE:
            lines.append(f"{each.node}: {each.verdict} after {each.nonces} nonces")
    return [f"{candidate.name}: {line}" for line in lines]


def _family(candidate: Candidate, row: Row | None) -> list[str]:
    head = [candidate.name, candidate.like]
    if row is None or candidate.refused:
        word = "not run" if row is None else "refused"
        return [*head, word, *[NONE] * (len(FAMILY_HEAD) - 3)]
    judged = {each.node: each for each in row.judged}
    errors = [f"{each.error:.4f}" for node in (ONE, TWO) if (each := judged.get(node))]
    return [
        *(*head, candidate.scheme, _steps(row)),
        *(_verdict(judged.get(node)) for node in (ONE, TWO, candidate.cheat)),
        ", ".join(f"{each.invalid}" for each in row.winners) or NONE,
        ", ".join(errors) or NONE,
    ]


def _format(candidate: Candidate, row: Row | None) -> list[str]:
    head = [candidate.name, candidate.like]
    if row is None:
        return [*head, *[NONE] * (len(FORMAT_HEAD) - 2)]
    judged = {each.node: each for each in row.judged}
    nodes = [judged.get(node) for node in (ONE, ROUNDED, candidate.cheat)]
    errors = [f"{each.error:.4f} ({each.size:.2f})" for each in nodes if each]
    return [*head, _passed(row, "smoke"), *map(_verdict, nodes), ", ".join(errors) or NONE]


def _steps(row: Row) -> str:
    """The steps that passed, in few words."""
    found = {step: _passed(row, step) for step in STEPS}
    failed = [step for step, word in found.items() if word != YES]
    if len(failed) > len(STEPS) // 2:
        return ", ".join(step for step in STEPS if step not in failed) or NONE
    return f"all but {', '.join(failed)}" if failed else "all"


def _passed(row: Row, step: str) -> str:
    if step not in row.checks:
        return NONE
    good = step not in row.errors and all(each.passed is not False for each in row.checks[step])
    return YES if good else "**no**"


def _verdict(judged: Judged | None) -> str:
    if judged is None:
        return NONE
    word = WORDS.get(SequentialResult(judged.verdict), f"no verdict ({judged.verdict})")
    return f"{word}, {judged.nonces}"


def _reason(candidate: Candidate, found: Mapping[str, Row]) -> str:
    """Why cells of a row are empty."""
    if candidate.refused and candidate.name in found:
        checks = found[candidate.name].checks.get("refusal", [])
        return "; ".join(f"{each.name}: {each.detail}" for each in checks)
    return candidate.by_block or ("" if candidate.name in found else "not run")
