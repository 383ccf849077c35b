"""The pictures of a report, as SVG. Each is left out if its steps have no figures."""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gpu.report import RunReport, figures_of
from proofserve.reports import drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Inches.
HEIGHT, ROW = 3.6, 0.3
PARTS = {"inputs": "tab:orange", "model": "tab:blue", "finish": "tab:green"}
REFERENCE = re.compile(r"nonces_per_second_(\d+)_(\d+)")
Record = Mapping[str, Any]
Panel = Callable[["Axes"], None]


def pictures(report: RunReport) -> list[tuple[str, str]]:
    """Title and SVG of every picture that this report has figures for."""
    records = {step.name: step.record for step in report.steps if step.record}
    found = []
    for title, names, draw in (
        ("Reference engine: nonces a second", ("reference",), _reference),
        ("One forward: shares of inputs, model and finish", ("profile",), _profile),
        ("Noise: errors of honest kernels, less the vectors in float32", (), _noise),
        ("Chat beside proofs, eager and with CUDA graphs", ("chat-priority",), _chat),
        ("What a token of proofs costs chat", ("same-batch",), _same_batch),
    ):
        if all(name in records for name in names) and (svg := draw(records)):
            found.append((title, svg))
    return found


def _reference(records: Mapping[str, Record]) -> str | None:
    figures = figures_of(records["reference"])
    speeds: dict[int, dict[int, float]] = {}
    for name, value in figures.items():
        if (match := REFERENCE.fullmatch(name)) and value is not None:
            speeds.setdefault(int(match[1]), {})[int(match[2])] = value

    def batches(axes: "Axes") -> None:
        sizes = sorted({batch for by_batch in speeds.values() for batch in by_batch})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set(xlabel="nonces in a forward")
        axes.legend()

    def speed(axes: "Axes") -> None:
        for length, by_batch in speeds.items():
            axes.plot(list(by_batch), list(by_batch.values()), "o-", label=f"{length} tokens")
        axes.set(yscale="log", ylabel="nonces a second")
        batches(axes)

    def share(axes: "Axes") -> None:
        for length, by_batch in speeds.items():
            shares = [figures.get(f"share_{length}_{batch}") or 0.0 for batch in by_batch]
            axes.plot(list(by_batch), shares, "o-", label=f"{length} tokens")
        axes.set(ylabel="of bare multiplications")
        axes.set_ylim(bottom=0.0)
        batches(axes)

    return drawn([speed, share], HEIGHT) if speeds else None


def _profile(records: Mapping[str, Record]) -> str | None:
    forwards = records["profile"]["windows"]["forwards"]
    names = [f"{each['scheme']}, {each['seq_len']} tokens" for each in forwards]

    def draw(axes: "Axes") -> None:
        left = [0.0] * len(forwards)
        for part, colour in PARTS.items():
            widths = [each["shares"][part] for each in forwards]
            axes.barh(names, widths, left=left, color=colour, label=part)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(PARTS))
        axes.set(xlabel="share of the forward's time")

    return drawn([draw], ROW * len(names) + 1.2)


def _noise(records: Mapping[str, Record]) -> str | None:
    """Emulated kernels once, and every real one."""
    shown = {
        population["facts"]["name"]: population["figures"]["lengths"]
        for step, record in records.items()
        # An audit's record has names of populations alone.
        if step.startswith("noise")
        for population in record.get("populations", ())
    }

    def draw(axes: "Axes") -> None:
        for height, distances in enumerate(shown.values()):
            axes.plot(distances, [height] * len(distances), "|", color="tab:blue", alpha=0.4)
        axes.set_yticks(range(len(shown)), list(shown))
        axes.invert_yaxis()
        axes.set(xscale="log", xlabel="length of the error")

    return drawn([draw], ROW * len(shown) + 1.2) if shown else None


def _chat(records: Mapping[str, Record]) -> str | None:
    kinds = {"chat-priority": "eager", "chat-graphs": "CUDA graphs"}
    found = {label: figures_of(records[n]) for n, label in kinds.items() if n in records}

    def panel(plain: str, beside: str, what: str) -> Panel:
        def draw(axes: "Axes") -> None:
            for place, (label, colour, shift) in enumerate(
                ((plain, "tab:gray", -0.2), (beside, "tab:blue", 0.2))
            ):
                heights = [figures.get(label) or 0.0 for figures in found.values()]
                places = [number + shift for number in range(len(found))]
                axes.bar(places, heights, 0.4, color=colour, label=("alone", "beside")[place])
            axes.set_xticks(range(len(found)), list(found))
            axes.set(ylabel=what)
            axes.legend(loc="lower center")

        return draw

    latency = panel("latency_s_plain", "latency_s_round", "seconds of a chat, median")

    def throughput(axes: "Axes") -> None:
        ratios = [figures.get("throughput_ratio") or 0.0 for figures in found.values()]
        axes.bar(range(len(found)), ratios, 0.5, color="tab:green")
        axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
        axes.set_xticks(range(len(found)), list(found))
        axes.set(ylabel="saturating chat with a round, over without")

    return drawn([latency, throughput], HEIGHT)


def _same_batch(records: Mapping[str, Record]) -> str | None:
    figures = figures_of(records["same-batch"])
    kinds = {"dedicated": "forwards of their own", "same_batch": "in chat's batch"}
    prefix = "chat_tokens_lost_per_proof_token_"
    costs = [figures.get(f"{prefix}{kind}") for kind in kinds]
    if None in costs:
        return None

    def draw(axes: "Axes") -> None:
        axes.bar(list(kinds.values()), [cost or 0.0 for cost in costs], 0.5, color="tab:blue")
        axes.set(ylabel="tokens of chat lost per token of proofs")

    return drawn([draw], HEIGHT)
