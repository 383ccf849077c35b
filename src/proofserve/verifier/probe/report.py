"""What a probe says: lines for a reader, a record for a program, a page for customers."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from typing_extensions import TypedDict

from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.reports import BLUE, GREEN, RED, drawn
from proofserve.verifier.judges import OpinionRecord
from proofserve.verifier.probe.endpoint import Kind, ProbePrompt
from proofserve.verifier.probe.probing import OTHER_RATIO, ProbeAnswer, ProbeResult, surprise_of
from proofserve.verifier.written.readings import ReadAnswer
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


class PromptRecord(TypedDict):
    """One prompt, and what its answer showed: None is what was not measured."""

    number: int
    kind: Kind
    greedy: bool
    prompt: str
    answer: str | None
    tokens: int | None
    ids_from: str | None
    largest_gap: float | None
    surprise_nats: float | None
    log_evidence_so_far: float | None
    error_over_own_rounding: float | None
    left_out: str | None


class BlockRecord(TypedDict):
    ratios: Sequence[float]
    cosines: Sequence[float]


class ProbeRecord(TypedDict):
    """What ``probe --json`` writes: ``ProbeReport`` as JSON."""

    verdict: SequentialResult
    label: str
    suspect: str | None
    text: str
    findings: list[OpinionRecord]
    error_over_own_rounding: float | None
    mean_cosine_with_suspect: float | None
    surprise_nats: float | None
    greedy_share_beyond: float | None
    blocks: BlockRecord
    suspects_not_seen: Sequence[str]
    prompts_asked: int
    prompt_tokens: int
    output_tokens: int
    suspect_forwards: int
    notes: list[str]
    setup: dict[str, Any]
    prompts: list[PromptRecord]


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
        if unseen := self._unseen:
            yield f"not to be told from the published weights: {', '.join(unseen)}"
        yield from self.notes
        for reason, count in Counter(each.reason for each in probed.seen.left_out).items():
            yield f"left out, {count}: {reason}"
        yield self.used

    @property
    def used(self) -> str:
        seen = self.probed.seen
        return (
            f"{len(seen.answers)} of {self.probed.asked} answers judged; the endpoint counted"
            f" {seen.prompt_tokens} tokens of prompts and {seen.output_tokens} of answers"
        )

    @property
    def _unseen(self) -> Sequence[str]:
        sizes = self.probed.seen.sizes
        return sizes.unseen if sizes else ()

    def record(self) -> ProbeRecord:
        probed, seen = self.probed, self.probed.seen
        return {
            "verdict": probed.verdict,
            "label": probed.label,
            "suspect": probed.suspect,
            "text": probed.text,
            "findings": [asdict(opinion) for opinion in probed.opinions],
            "error_over_own_rounding": probed.ratio,
            "mean_cosine_with_suspect": float(np.mean(probed.cosines)) if probed.cosines else None,
            "surprise_nats": surprise_of(seen.answers),
            "greedy_share_beyond": seen.greedy.share,
            "blocks": {"ratios": probed.ratios, "cosines": probed.cosines},
            "suspects_not_seen": self._unseen,
            "prompts_asked": probed.asked,
            "prompt_tokens": seen.prompt_tokens,
            "output_tokens": seen.output_tokens,
            "suspect_forwards": seen.readings.forwards,
            "notes": list(self.notes),
            "setup": dict(self.setup),
            "prompts": self.rows(),
        }

    def rows(self) -> list[PromptRecord]:
        """The evidence of every prompt, in the order in which they were asked."""
        seen = self.probed.seen
        judged = zip(seen.judged, seen.answers, seen.evidence, strict=True)
        rows = [_row(answer.prompt, (answer, read), log) for answer, read, log in judged]
        rows += [_row(each.prompt, left_out=each.reason) for each in seen.left_out]
        return sorted(rows, key=lambda row: row["number"])


def _row(
    prompt: ProbePrompt,
    judged: tuple[ProbeAnswer, ReadAnswer] | None = None,
    log_evidence: float | None = None,
    left_out: str | None = None,
) -> PromptRecord:
    answer, read = judged or (None, None)
    return {
        "number": prompt.number,
        "kind": prompt.kind,
        "greedy": prompt.greedy,
        "prompt": prompt.text,
        "answer": answer.text if answer else None,
        "tokens": len(answer.output_ids) if answer else None,
        "ids_from": answer.ids_from if answer else None,
        "largest_gap": float(read.gaps.max()) if read and prompt.greedy else None,
        "surprise_nats": read.surprise if read and not prompt.greedy else None,
        "log_evidence_so_far": log_evidence,
        "error_over_own_rounding": read.ratio if read else None,
        "left_out": left_out,
    }


def page(report: ProbeReport) -> str:
    return rendered(
        "proofserve.verifier",
        "probe/probe_page.html",
        report=report,
        tone=CLASSES[report.probed.verdict],
        rows=report.rows(),
        pictures=pictures(report.probed),
        other_ratio=OTHER_RATIO,
        facts=report.setup.items(),
    )


def pictures(probed: ProbeResult) -> dict[str, str]:
    """SVG by what it shows. Only what was measured is drawn."""
    gaps = [float(g) for r in probed.seen.answers if r.is_greedy for g in r.gaps]
    panels: dict[str, tuple[Sequence[float], Callable[[Axes], None]]] = {
        "ratios": (probed.ratios, partial(_draw_ratios, probed.ratios)),
        "cosines": (probed.cosines, partial(_draw_cosines, probed.cosines)),
        "evidence": (probed.seen.evidence, partial(_draw_evidence, probed.seen.evidence)),
        "gaps": (gaps, partial(_draw_gaps, gaps, probed.seen.greedy.bound)),
    }
    return {name: drawn([draw], HEIGHT) for name, (values, draw) in panels.items() if values}


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
