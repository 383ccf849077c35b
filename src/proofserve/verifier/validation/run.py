"""One run over all nodes: who is due is asked, who has answered is judged, and all is kept."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proofserve.engines import CheckpointError
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.node_client import Unproved, UnprovedError
from proofserve.remote.records import Work
from proofserve.reports import Progress, ReportedError
from proofserve.verifier.bundle import write_bundle
from proofserve.verifier.judging import JudgingOptions
from proofserve.verifier.validation.judging import (
    ModelJudge,
    PassedLayer,
    ValidatedModel,
    Verdict,
    ask_all,
)
from proofserve.verifier.validation.ledger import Ledger, NodeResult, OpenChallenge

# A killed run asks again what was not answered, with the same block, but not later than this: a
# node that was asked hours ago may have rented what it lacks.
ASKED_AGAIN_S: Final = 600.0
# Of the time between two challenges, so that a scheduler that is early by a little skips no turn.
_DUE: Final = 0.9


@dataclass(frozen=True, slots=True)
class ValidationPlan:
    """What ``nodes.toml`` says. ``alpha`` is the chance to convict an honest node in any year."""

    models: tuple[ValidatedModel, ...]
    ledger: Path
    alpha: float
    beta: float
    share: float
    every_s: float
    nonces: int
    deadline_s: float
    bundles: Path | None = None
    page: Path | None = None
    metrics: Path | None = None

    @property
    def nodes(self) -> Mapping[str, str]:
        """The model of each node, by their names."""
        return {node.name: model.name for model in self.models for node in model.nodes}


@dataclass(frozen=True, slots=True)
class Validation:
    """One run of ``plan``. ``passed`` hears of passes over weights, ``clock`` is Unix time."""

    plan: ValidationPlan
    ledger: Ledger
    progress: Progress
    passed: PassedLayer
    clock: Callable[[], float] = time.time

    def run(self) -> Iterator[NodeResult]:
        """What is found, as it is found; then it is in the ledger. Raises ReportedError."""
        yield from self._interrupted()
        standings = self.ledger.standings([*self.plan.nodes])
        busy = {each.node for each in self.ledger.open_challenges()}
        now, soonest = self.clock(), _DUE * self.plan.every_s
        for model in self.plan.models:
            due = {}
            for node in model.nodes:
                of = standings[node.name]
                if node.name in busy or (of.asked_at and now - of.asked_at < soonest):
                    continue
                if of.alpha_spent >= self.plan.alpha:
                    text = f"alpha: {of.alpha_spent:.3g} of {self.plan.alpha:g} are spent this year"
                    reason = f"{text}: it could not be convicted, and is not asked"
                    yield NodeResult(node.name, model.name, None, reason)
                    continue
                due[node.name] = node.url
            if due:
                spending = self.plan.alpha, self.plan.every_s
                self.ledger.begin(model.name, model.shape, self.plan.nonces, due, spending)
            yield from self._ask(model)
            yield from self._judge(model)

    def _interrupted(self) -> Iterator[NodeResult]:
        """Ends what an earlier run has left open and this one can neither ask nor judge."""
        now = {
            node.name: (model.name, node.url, _shape(model.shape))
            for model in self.plan.models
            for node in model.nodes
        }
        for each in self.ledger.open_challenges():
            if now.get(each.node) != (each.model, each.url, _shape(each.challenge.work)):
                reason = "nodes.toml has no such node of this model, URL and scheme any more"
            elif each.answers is None and self.clock() - each.asked_at > ASKED_AGAIN_S:
                reason = "the validator was ended before the answer came"
            else:
                continue
            yield self._unproved(each, UnprovedError(Unproved.INTERRUPTED, reason))

    def _of(self, model: ValidatedModel, *, answered: bool) -> list[OpenChallenge]:
        every = [each for each in self.ledger.open_challenges() if each.model == model.name]
        return [each for each in every if (each.answers is not None) is answered]

    def _ask(self, model: ValidatedModel) -> Iterator[NodeResult]:
        nodes, wanted = {node.name: node for node in model.nodes}, self._of(model, answered=False)
        if not wanted:
            return
        text = f"{model.name}: {len(wanted)} nodes have {self.plan.deadline_s:g} s to answer"
        self.progress.step(text, len(wanted))
        asked = [(nodes[each.node], each) for each in wanted]
        for each, call in ask_all(asked, self.plan.deadline_s):
            self.progress.advance()
            # Whatever one node makes go wrong here, the others are asked and judged.
            if isinstance(error := call.exception(), UnprovedError):
                yield self._unproved(each, error)
            elif isinstance(error, Exception):
                unreadable = UnprovedError(Unproved.UNREADABLE, f"{each.url}: {error!r}")
                yield self._unproved(each, unreadable)
            else:
                kept, seconds = call.result()
                self.ledger.answered(each.number, kept.model_dump_json(), seconds)

    def _judge(self, model: ValidatedModel) -> Iterator[NodeResult]:
        answered = self._of(model, answered=True)
        if not answered:
            return
        self.progress.step(f"{model.name}: judging {len(answered)} nodes", len(answered))
        options = JudgingOptions(
            beta=self.plan.beta, share=self.plan.share, threshold=model.measured
        )
        judge, left = ModelJudge(model, options, self.passed), {each.node for each in answered}
        try:
            for each, call in judge.verdicts(answered):
                self.progress.advance()
                if isinstance(error := call.exception(), UnprovedError):
                    yield self._unproved(each, error)
                elif isinstance(error, Exception):
                    yield NodeResult(each.node, model.name, None, _kept(error))
                else:
                    yield self._judged(model, each, call.result())
                left.remove(each.node)
        except (ReportedError, ProtocolError, CheckpointError) as error:
            # The checkpoint or its calibration: other models have theirs.
            yield from (NodeResult(name, model.name, None, _kept(error)) for name in sorted(left))

    def _judged(self, model: ValidatedModel, asked: OpenChallenge, found: Verdict) -> NodeResult:
        heard, report = found
        verdict, reason = report.outcome.verdict, report.reason
        if self.plan.bundles is not None and model.checkpoint is not None:
            self.plan.bundles.mkdir(parents=True, exist_ok=True)
            file = self.plan.bundles / f"{asked.node}-{asked.number}.json"
            kept = file if verdict is not SequentialResult.HONEST else None
            judged_with = model.calibration, model.suspects
            unwritten = write_bundle(kept, heard, report, None, judged_with)
            reason = f"{reason}; {unwritten}" if unwritten else reason
        self.ledger.judged(asked.number, verdict, reason, report.record())
        return NodeResult(asked.node, model.name, verdict, reason)

    def _unproved(self, asked: OpenChallenge, error: UnprovedError) -> NodeResult:
        self.ledger.unproved(asked.number, error.kind, str(error), error.seconds)
        outcome = SequentialResult.UNPROVED
        return NodeResult(asked.node, asked.model, outcome, str(error), error.kind)


def _shape(work: Work) -> tuple[str | None, int, int]:
    return work.scheme, work.seq_len, work.k_dim


def _kept(error: Exception) -> str:
    text = str(error) if isinstance(error, ReportedError) else repr(error)
    return f"{text}; its answer is kept, and the next run judges it"
