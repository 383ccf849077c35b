"""What a probe says: lines for a reader, and a record for a program."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from proofserve.lab.probe.probing import Probed
from proofserve.lab.probe.readings import ReadAnswer
from proofserve.lab.probe.records import LeftOut


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """``setup`` are the options, ``notes`` what the endpoint did not give or asked for."""

    probed: Probed
    setup: Mapping[str, Any]
    notes: Sequence[str]

    def lines(self) -> Iterator[str]:
        probed = self.probed
        for finding in probed.findings:
            yield f"  {finding.test:10} {finding.result}: {finding.text}"
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
        judgement, seen = probed.judgement, probed.diagnosis
        return {
            "verdict": judgement.result,
            "label": judgement.label,
            "suspect": judgement.suspect,
            "text": judgement.text,
            "findings": [asdict(finding) for finding in probed.findings],
            "error_over_own_rounding": seen.ratio,
            "mean_cosine_with_suspect": float(np.mean(seen.cosines)) if seen.cosines else None,
            "surprise_nats": seen.surprise,
            "greedy_share_beyond": seen.beyond,
            "blocks": {"ratios": probed.ratios, "cosines": seen.cosines},
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
        rows = [_judged_row(read, log_evidence) for read, log_evidence in pairs]
        rows += [_left_out_row(each) for each in self.probed.left_out]
        return sorted(rows, key=lambda row: int(row["number"]))


def _judged_row(read: ReadAnswer, log_evidence: float) -> dict[str, Any]:
    answer = read.answer
    greedy = answer.prompt.greedy
    return {
        "number": answer.prompt.number,
        "kind": answer.prompt.kind,
        "greedy": greedy,
        "prompt": answer.prompt.text,
        "answer": answer.text,
        "tokens": len(answer.read.output_ids),
        "ids_from": answer.ids_from,
        "largest_gap": float(read.gaps.max()) if greedy else None,
        "surprise_nats": None if greedy else read.surprise,
        "log_evidence_so_far": log_evidence,
        "error_over_own_rounding": _ratio(read),
        "left_out": None,
    }


def _left_out_row(each: LeftOut) -> dict[str, Any]:
    prompt = each.prompt
    empty = dict.fromkeys(
        ("answer", "tokens", "ids_from", "largest_gap", "surprise_nats", "log_evidence_so_far")
    )
    return {
        "number": prompt.number,
        "kind": prompt.kind,
        "greedy": prompt.greedy,
        "prompt": prompt.text,
        **empty,
        "error_over_own_rounding": None,
        "left_out": each.reason,
    }


def _ratio(read: ReadAnswer) -> float | None:
    """None without log-probabilities."""
    known = [t for t, error in enumerate(read.errors) if error.size]
    if not known:
        return None
    error, own = (np.concatenate([of[t] for t in known]) for of in (read.errors, read.own))
    return float(np.linalg.norm(error) / np.linalg.norm(own))
