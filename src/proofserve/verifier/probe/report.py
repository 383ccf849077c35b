"""What a probe says: lines for a reader, a record for a program, a page for customers."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from proofserve.lab.report import BLUE, GREEN, RED, drawn
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.verifier.probe.endpoint import ProbePrompt
from proofserve.verifier.probe.probing import OTHER_RATIO, ProbeResult
from proofserve.verifier.probe.readings import ReadAnswer
from proofserve.web import rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT: Final = 3.2
# Powers of ten of the evidence that are shown.
LEAST, MOST = -12.0, 12.0
# Smaller gaps of greedy tokens, zero too, are drawn there.
NEAREST: Final = 1e-4
CLASSES: Final = {
    SequentialResult.HONEST: "good",
    SequentialResult.FRAUD: "bad",
    SequentialResult.UNDECIDED: "open",
    SequentialResult.UNEXPLAINED: "open",
}


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """``setup`` are the options, ``notes`` what the endpoint did not give or asked for."""

    probed: ProbeResult
    setup: Mapping[str, Any]
    notes: Sequence[str]

    def lines(self) -> Iterator[str]:
        probed = self.probed
        for opinion in probed.opinions:
            yield f"  {opinion.test:10} {opinion.result}: {opinion.text}"
        if probed.unseen:
            yield f"not to be told from the published weights: {', '.join(probed.unseen)}"
        yield from self.notes
        for reason, count in Counter(each.reason for each in probed.left_out).items():
            yield f"left out, {count}: {reason}"
        yield self.used

    @property
    def used(self) -> str:
        probed = self.probed
        return (
            f"{len(probed.answers)} of {probed.asked} answers judged; the endpoint counted"
            f" {probed.prompt_tokens} tokens of prompts and {probed.output_tokens} of answers"
        )

    def record(self) -> dict[str, Any]:
        probed = self.probed
        return {
            "verdict": probed.verdict,
            "label": probed.label,
            "suspect": probed.suspect,
            "text": probed.text,
            "findings": [asdict(opinion) for opinion in probed.opinions],
            "error_over_own_rounding": probed.ratio,
            "mean_cosine_with_suspect": float(np.mean(probed.cosines)) if probed.cosines else None,
            "surprise_nats": probed.surprise,
            "greedy_share_beyond": probed.beyond,
            "blocks": {"ratios": probed.ratios, "cosines": probed.cosines},
            "suspects_not_seen": probed.unseen,
            "prompts_asked": probed.asked,
            "prompt_tokens": probed.prompt_tokens,
            "output_tokens": probed.output_tokens,
            "suspect_forwards": probed.forwards,
            "notes": list(self.notes),
            "setup": dict(self.setup),
            "prompts": self.rows(),
        }

    def rows(self) -> list[dict[str, Any]]:
        """The evidence of every prompt, in the order in which they were asked."""
        pairs = zip(self.probed.answers, self.probed.evidence, strict=True)
        rows = [_row(read.answer.prompt, _figures(read, log)) for read, log in pairs]
        rows += [_row(each.prompt, {}, each.reason) for each in self.probed.left_out]
        return sorted(rows, key=lambda row: int(row["number"]))


# What was found of an answer that was not left out.
_FOUND: Final = (
    *("answer", "tokens", "ids_from", "largest_gap", "surprise_nats", "log_evidence_so_far"),
    "error_over_own_rounding",
)


def _row(
    prompt: ProbePrompt, found: Mapping[str, Any], left_out: str | None = None
) -> dict[str, Any]:
    return {
        "number": prompt.number,
        "kind": prompt.kind,
        "greedy": prompt.greedy,
        "prompt": prompt.text,
        **{name: found.get(name) for name in _FOUND},
        "left_out": left_out,
    }


def _figures(read: ReadAnswer, log_evidence: float) -> dict[str, Any]:
    answer = read.answer
    greedy = answer.prompt.greedy
    return {
        "answer": answer.text,
        "tokens": len(answer.output_ids),
        "ids_from": answer.ids_from,
        "largest_gap": float(read.gaps.max()) if greedy else None,
        "surprise_nats": None if greedy else read.surprise,
        "log_evidence_so_far": log_evidence,
        "error_over_own_rounding": _ratio(read),
    }


def _ratio(read: ReadAnswer) -> float | None:
    """None without log-probabilities."""
    known = [t for t, error in enumerate(read.errors) if error.size]
    if not known:
        return None
    error, own = (np.concatenate([of[t] for t in known]) for of in (read.errors, read.own))
    return float(np.linalg.norm(error) / np.linalg.norm(own))


def page(report: ProbeReport) -> str:
    return rendered(
        "proofserve.verifier",
        "probe/probe_page.html",
        report=report,
        tone=CLASSES[report.probed.verdict],
        rows=report.rows(),
        pictures=pictures(report),
        assumptions=(),
        facts=report.setup.items(),
    )


def pictures(report: ProbeReport) -> list[tuple[str, str]]:
    """Captions, and SVG. Only what was measured is drawn."""
    return [(caption, drawn([draw], HEIGHT)) for caption, draw in _panels(report.probed)]


def _panels(probed: ProbeResult) -> Iterator[tuple[str, Callable[["Axes"], None]]]:
    if probed.ratios:
        caption = (
            "The endpoint's errors over our own rounding, block by block. Honest ones lie around 1;"
            f" from {OTHER_RATIO:g} on (dashed) only 4 bits or another model do it."
        )
        yield caption, partial(_draw_ratios, probed.ratios)
    if probed.cosines:
        caption = (
            f"Cosines of the errors with what {probed.suspect} would do, block by block."
            " Honest ones lie around 0."
        )
        yield caption, partial(_draw_cosines, probed.cosines)
    if probed.evidence:
        caption = (
            "Evidence of the token test after each answer, as a power of ten: it falls for honest"
            " answers, and convicts far above 6."
        )
        yield caption, partial(_draw_evidence, probed.evidence)
    gaps = [float(g) for r in probed.answers if r.answer.prompt.greedy for g in r.gaps]
    if gaps:
        caption = (
            "How far the logits of greedy tokens are below the largest: the largest first. Honest"
            " rounding explains those below the dashed line."
        )
        yield caption, partial(_draw_gaps, gaps, probed.bound)


def _draw_ratios(ratios: Sequence[float], axes: "Axes") -> None:
    axes.plot(np.arange(len(ratios)), ratios, "o", color=BLUE, alpha=0.6)
    axes.axhline(1.0, color=GREEN, linewidth=0.8)
    axes.axhline(OTHER_RATIO, color=RED, linewidth=0.8, linestyle="--")
    axes.set(yscale="log", xlabel="block of 16 tokens", ylabel="error / own rounding")


def _draw_cosines(cosines: Sequence[float], axes: "Axes") -> None:
    axes.plot(np.arange(len(cosines)), cosines, "o", color=RED, alpha=0.6)
    axes.axhline(0.0, color=GREEN, linewidth=0.8)
    axes.set(ylim=(-1.0, 1.05), xlabel="block of 16 tokens", ylabel="cosine")


def _draw_evidence(evidence: Sequence[float], axes: "Axes") -> None:
    powers = np.clip(np.array(evidence) / math.log(10), LEAST, MOST)
    axes.step(np.arange(1, len(powers) + 1), powers, where="post", color=BLUE)
    axes.set(ylim=(LEAST, MOST), xlabel="answers", ylabel="log10 E")


def _draw_gaps(gaps: Sequence[float], bound: float, axes: "Axes") -> None:
    ordered = np.maximum(np.sort(gaps)[::-1], NEAREST)
    axes.plot(np.arange(1, len(ordered) + 1), ordered, "o", color=BLUE, alpha=0.6, markersize=3)
    axes.axhline(max(bound, NEAREST), color=RED, linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="greedy tokens", ylabel="gap of logits")
