"""``docs/real-gpus.md``, its tables as CSV, and its picture: what came of all verifications."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from measuring.results import csv_text, table
from proofserve.reports import BLUE, GREEN, RED, WIDTH
from real_gpus.deployments import Group
from real_gpus.trying import DISTANCE, NEVER, Endings, Kind, by_the_network

TEXT: Final = Path(__file__).with_suffix(".txt")
_SOON: Final = 100
# In so many parts, with seeds of their own, orders are tried.
PARTS: Final = 10
_HEAD: Final = (
    *("judged", "references on", "suspect node", "convicted", "cleared"),
    *("choices and nodes", "convicted after", "cleared after"),
)
# So many columns are on the page, all in the CSV.
_SHOWN: Final = 5
_SHARES: Final = (0.5, 0.99, 0.999)
_CLEARED: Final = 0.99

Found = Sequence[tuple[Group, Mapping[Kind, Endings]]]


def page(found: Found, orders: int, nonces: int, machine: str) -> str:
    honest = [of for _, kinds in found for kind, of in kinds.items() if not kind.cheap]
    sources = sorted({each.facts.source for group, _ in found for each in group.deployments})
    return TEXT.read_text().format(
        machine=machine,
        orders=orders,
        nonces=nonces,
        limit=DISTANCE,
        source=f"The vectors are from: {'; '.join(sources)}.",
        honest_runs=sum(len(of.nodes) for of in honest) * orders // PARTS,
        tables="\n\n".join(_of_group(group, kinds) for group, kinds in found),
        worst=_worst(found),
        network=_network([group for group, _ in found]),
    )


def convicted_honest(found: Found) -> list[str]:
    """A line for each honest deployment that was convicted."""
    return [
        f"{group.model}: {name} was convicted"
        for group, kinds in found
        for kind, of in kinds.items()
        if not kind.cheap
        for name, ended in zip(of.nodes, of.convicted, strict=True)
        if (ended < NEVER).any()
    ]


def _of_group(group: Group, kinds: Mapping[Kind, Endings]) -> str:
    """Honest ones without a suspect, and cheap ones in every nonce; the CSV has the others."""
    title = f"### {group.model}, {len(group.deployments)} deployments"
    if not kinds:
        return f"{title}\n\nWith three references none is left to be judged."
    whole = {
        kind: of
        for kind, of in kinds.items()
        if kind.share == 1.0 and (kind.cheap or not kind.suspect)
    }
    rows = [row[:_SHOWN] for row in _rows(whole)]
    return f"{title}\n\n{table(_HEAD[:_SHOWN], rows)}"


def _rows(kinds: Mapping[Kind, Endings]) -> list[Sequence[str]]:
    return [
        (
            _title(kind),
            f"{kind.kinds} kind{'s' * (kind.kinds > 1)} of card",
            kind.suspect or "none",
            *(f"{of.share(ended, _SOON):.2%}" for ended in (of.convicted, of.cleared)),
            str(len(of.nodes) // PARTS),
            *(_after(of, ended) for ended in (of.convicted, of.cleared)),
        )
        for kind, of in kinds.items()
        # A suspect of yet other weights says nothing.
        if not kind.cheap or kind.suspect in {"", kind.weights}
    ]


def verdicts_csv(found: Found) -> str:
    """Every line of the tables, also of nodes that are cheap in a share of their nonces."""
    rows = [(group.model, *row) for group, kinds in found for row in _rows(kinds)]
    return csv_text(("model", *_HEAD), rows)


def _title(kind: Kind) -> str:
    if not kind.cheap:
        return f"honest, {kind.weights}"
    return (
        kind.weights if kind.share == 1.0 else f"{kind.weights}, on {kind.share:.0%} of the nonces"
    )


def _after(of: Endings, ended: Sequence[NDArray[np.int64]]) -> str:
    after = (of.nonces(ended, each) for each in _SHARES)
    return ", ".join("-" if each is None else str(each) for each in after)


def _worst(found: Found) -> str:
    lines = []
    for group, kinds in found:
        for kind, of in kinds.items():
            name, share = of.worst(_SOON)
            if not kind.cheap and kind.kinds > 1 and not kind.suspect and share < _CLEARED:
                lines.append(
                    f"* {group.model}, {kind.kinds} kinds of card: of the honest deployments {name}"
                    f" least often, in {share:.0%}; else it stays undecided."
                )
    return "\n".join(lines)


def deployments_csv(groups: Sequence[Group]) -> str:
    """Which file has which weights and GPUs, and how far it is from honest ones."""
    rows = [
        (
            each.name,
            group.model,
            each.facts.weights,
            each.title,
            "honest" if each.facts.honest else "cheap",
            f"{np.median(_distances(group, i)):.3f}",
        )
        for group in groups
        for i, each in enumerate(group.deployments)
    ]
    return csv_text(("file", "model", "weights", "ran on", "is", "median distance"), rows)


def _distances(group: Group, node: int) -> NDArray[np.float64]:
    """From every other honest deployment, of all nonces."""
    others = [i for i in group.honest if i != node]
    away = group.vectors[others] - group.vectors[node]
    found: NDArray[np.float64] = np.linalg.norm(away, axis=-1).ravel()
    return found


def _network(groups: Sequence[Group]) -> str:
    parts = []
    for group in groups:
        honest, of_honest, cheap, of_cheap = by_the_network(group)
        more = f" and {cheap} of {of_cheap} pairs with a cheap one" if of_cheap else ""
        parts.append(f"{honest} of {of_honest} pairs of honest {group.model} nodes{more}")
    return f"convicts {'; '.join(parts)}."


def draw(groups: Sequence[Group], file: Path) -> None:
    """A histogram of distances for each group, honest ones and cheap ones. Raises OSError."""
    figure = Figure(figsize=(WIDTH, 2.5 * len(groups)), layout="constrained")
    rows = figure.subplots(len(groups), squeeze=False)
    for axes, group in zip(rows[:, 0], groups, strict=True):
        edges = np.geomspace(0.01, 2.0, 60).tolist()
        style = {"bins": edges, "density": True, "histtype": "stepfilled", "alpha": 0.5}
        together = [_distances(group, i) for i in group.honest]
        axes.hist(np.concatenate(together), color=GREEN, label="honest", **style)
        for weights, colour in zip(group.cheap_weights, (RED, "tab:purple"), strict=False):
            those = [_distances(group, i) for i in group.serving(weights)]
            axes.hist(np.concatenate(those), color=colour, label=weights, **style)
        axes.axvline(DISTANCE, color=BLUE, linestyle="--")
        axes.set(title=group.model, xscale="log", xlabel="distance", ylabel="density")
        axes.legend()
    figure.savefig(file, format="png")
