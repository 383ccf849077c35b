"""``docs/soundness.md``: what was tried and what came of it, in figures that were seen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from soundness.results import FORMS, Cell, Cheat, Found, HonestNode
from soundness.subjects import BY_NAME

TEXT: Final = Path(__file__).with_suffix(".txt")
UNKNOWN: Final = (
    "GPUs, models of a real size, contexts beyond {longest} tokens, processors other than those"
    " named here, kernels that round where none of the emulated ones does, and weights that were"
    " rounded with the help of data (AWQ, GPTQ)."
)
Row = Sequence[str]


def page(found: Sequence[Found], machine: str) -> str:
    """``found`` are the models and schemes that were tried."""
    lengths = {f"{max(n.nonces for n in f.honest)} of {f.seq_len}": 0 for f in found}
    arches = list(dict.fromkeys(each.arch for each in found))
    return TEXT.read_text().format(
        summary=summary(found),
        unknown=_unknown(found),
        runs=found[0].runs,
        most=found[0].most,
        soon=found[0].soon,
        runs_of_cheats=found[0].runs_of_cheats,
        matrix=_matrix(found),
        details="\n\n".join(_details(found, arch) for arch in arches),
        cheats=_cheats(found),
        forged=_forged(found),
        nonces=f"{' or '.join(lengths)} tokens",
        models=", ".join(f"{arch} ({BY_NAME[arch].what})" for arch in arches),
        machine=machine,
    )


def _unknown(found: Sequence[Found]) -> str:
    """Also which of the models have not been run."""
    text = UNKNOWN.format(longest=max(each.seq_len for each in found))
    done = {each.arch for each in found}
    left = [f"{arch} ({subject.what})" for arch, subject in BY_NAME.items() if arch not in done]
    return (
        f"{text} Of the models that can be tried, these were not: {', '.join(left)}."
        if left
        else text
    )


def summary(found: Sequence[Found]) -> str:
    """The answer in one paragraph."""
    emulated = {node.name for each in found for node in each.honest if node.processor is None}
    real = [_title(node) for each in found for node in each.honest if node.processor is not None]
    schemes = {each.scheme for each in found}
    processors = {n.processor for each in found for n in each.honest if n.processor is not None}
    cells = [cell for each in found for node in each.honest for cell in node.cells.values()]
    convicted, tried = sum(cell.convicted for cell in cells), found[0].runs * len(cells)
    text = (
        f"Tried as honest nodes were {len(emulated)} emulated kernels on"
        f" {len({each.arch for each in found})} models, and {len(real)} runs of real nodes on"
        f" processors that call themselves {'; '.join(sorted(processors))}, with {len(schemes)}"
        " schemes, and with a calibration, with one that lacks the node's kernel, and without any:"
        f" **{convicted:,} of {tried:,}** simulated verifications convicted one."
    )
    if convicted:
        text += f" They are: {'; '.join(convicted_honest(found))}."
    cheats = [cheat for each in found for cheat in each.cheats]
    slow = sum(cheat.convicts_at[1] is None for cheat in cheats)
    return (
        f"{text} Of {len(cheats)} cheats (weights, shares of the nonces and schemes),"
        f" {len(cheats) - slow} are convicted by 99.9 % of the verifications within 1,000 nonces."
    )


def convicted_honest(found: Sequence[Found]) -> list[str]:
    """The cells that must not be: honest nodes that were convicted."""
    return [
        f"{each.arch}, {each.scheme}, {form}: {node.name} in {node.cells[form].convicted:,}"
        for each in found
        for node in each.honest
        for form in node.cells
        if node.cells[form].convicted
    ]


def _matrix(found: Sequence[Found]) -> str:
    head = ["model", "scheme", "nodes", *(f"{form}: convicted; cleared" for form in FORMS)]
    rows = [
        [each.arch, each.scheme, _nodes(each), *(_sum(each, form) for form in FORMS)]
        for each in found
    ]
    return table(head, rows)


def _real(found: Found) -> Sequence[HonestNode]:
    return [node for node in found.honest if node.processor is not None]


def _nodes(found: Found) -> str:
    return f"{len(found.honest)}, of them {' / '.join(node.name for node in _real(found))}"


def _sum(found: Found, form: str) -> str:
    most = max(node.cells[form].convicted for node in found.honest)
    cleared = (f"{node.cells[form].soon / found.runs:.1%}" for node in _real(found))
    return f"{_strong(most)}; {' / '.join(cleared)}"


def _details(found: Sequence[Found], arch: str) -> str:
    """The model's nodes one by one: convicted, cleared, no verdict and undecided of each form."""
    of_model = [each for each in found if each.arch == arch]
    head = ["honest node", *(f"{each.scheme}, {form}" for each in of_model for form in FORMS)]
    names = dict.fromkeys(_title(node) for each in of_model for node in each.honest)
    known = [{_title(node): node for node in each.honest} for each in of_model]
    rows = [
        [name, *(_cell(of[name].cells[form]) for of in known for form in FORMS)] for name in names
    ]
    about = "; ".join(f"{each.scheme}: {each.calibration}" for each in of_model)
    return (
        f"### {arch}: {BY_NAME[arch].what}, {of_model[0].seq_len} tokens\n\n{about}. In a cell:"
        f" convicted, then cleared, no verdict, undecided.\n\n{table(head, rows)}"
    )


def _title(node: HonestNode) -> str:
    return f"{node.name}, {node.processor}" if node.processor else node.name


def _cell(cell: Cell) -> str:
    return f"{_strong(cell.convicted)}; {cell.cleared}, {cell.unexplained}, {cell.undecided}"


def _strong(convicted: int) -> str:
    return f"**{convicted}**" if convicted else "0"


def _cheats(found: Sequence[Found]) -> str:
    """A row for the shares of a cheat, the largest first."""
    rows = []
    for each in found:
        by_weights: dict[str, list[Cheat]] = {}
        for cheat in each.cheats:
            by_weights.setdefault(cheat.weights, []).append(cheat)
        for name, shares in by_weights.items():
            about = [f"{shares[0].size:.2f}", f"{shares[0].footprint:.2f}"]
            ends = [_ending(cheat, each.runs_of_cheats) for cheat in shares]
            rows.append([each.arch, each.scheme, name, *about, *ends])
    on = dict.fromkeys(f"{cheat.share:.0%}" for each in found for cheat in each.cheats)
    return table(["model", "scheme", "weights", "size", "footprint", *on], rows)


def _ending(cheat: Cheat, runs: int) -> str:
    half, most = ("never" if n is None else str(n) for n in cheat.convicts_at)
    return f"{half}, {most}; {cheat.cleared / runs:.1%}"


def _forged(found: Sequence[Found]) -> str:
    head = ["scheme", "tests", "convicted", "nonces at most"]
    rows = [
        [each.scheme, one.tests, f"{one.convicted} of {one.times}", str(one.most)]
        for each in found
        for one in each.forged
    ]
    return table(head, rows)


def table(head: Row, rows: Sequence[Row]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
