"""A probe: prompts in groups, until the answers are enough for a verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from proofserve.lab.client.errors import LabError
from proofserve.lab.client.progress import Progress
from proofserve.lab.probe.block_judges import BlockJudges
from proofserve.lab.probe.blocks import ProbeBlocks
from proofserve.lab.probe.diagnosis import Diagnosis, by_blocks, by_tokens, surprise_of
from proofserve.lab.probe.endpoint import Endpoint
from proofserve.lab.probe.ports import LogitReader, Tokens
from proofserve.lab.probe.probe_verdict import LEAST_JUDGED, ProbeVerdict, judged, prompts_more
from proofserve.lab.probe.readings import ReadAnswer, Readings
from proofserve.lab.probe.records import LeftOut, ProbeAnswer, ProbePrompt, RawAnswer
from proofserve.lab.probe.token_ids import resolved
from proofserve.lab.probe.token_judges import GreedyJudge, LikelihoodJudge, TokenJudge
from proofserve.lab.verify.judges import Chances, Finding, Standings
from proofserve.lab.verify.verification import verdict_of
from proofserve.protocol.verdict.sequential import SequentialResult

# Tests that share alpha: tokens and likelihood, or tokens, sizes and directions. The test of greedy
# tokens is a bound and has no alpha.
_WITHOUT_LOGS, _WITH_LOGS = 2, 3
# What more answers do not change.
_ENDS: Final = frozenset({SequentialResult.HONEST, SequentialResult.FRAUD})
_TOKENS_CLEAR: Final = ("tokens", "likelihood")
_LOGS_CLEAR: Final = ("tokens", "paired", "direction")


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found, after ``asked`` prompts.

    ``ratios`` are the errors of each block over our own rounding, ``evidence`` is that of the token
    test after each answer, ``bound`` that of the greedy gaps. ``unseen`` are suspects that cannot
    be told from the published weights, ``forwards`` counts answers read by suspects.
    """

    judgement: ProbeVerdict
    findings: tuple[Finding, ...]
    diagnosis: Diagnosis
    answers: tuple[ReadAnswer, ...]
    left_out: tuple[LeftOut, ...]
    ratios: tuple[float, ...]
    unseen: tuple[str, ...]
    evidence: tuple[float, ...]
    bound: float
    asked: int
    forwards: int
    prompt_tokens: int
    output_tokens: int


class Probing:
    """Judges answers one after the other. The methods raise EngineFault."""

    def __init__(self, tokens: Tokens, reader: LogitReader, chances: Chances) -> None:
        self._tokens = tokens
        self._readings = Readings(reader)
        self._chances = chances
        self._blocks = ProbeBlocks(self._readings)
        self._answers: list[ReadAnswer] = []
        self._left_out: list[LeftOut] = []
        self._evidence: list[float] = []
        self._used = [0, 0]
        self._began = False
        self._greedy = GreedyJudge(self._readings)
        self._drawn = TokenJudge(self._readings, chances, all_fields=True)
        self._likelihood: LikelihoodJudge | None = None
        self._sizes: BlockJudges | None = None

    def add(self, raws: Sequence[RawAnswer | LeftOut], all_fields: bool = True) -> SequentialResult:
        """Judge a group, up to a verdict.

        ``all_fields`` says of the first group whether the endpoint took all fields of a request.
        """
        known = [r if isinstance(r, LeftOut) else resolved(r, self._tokens) for r in raws]
        self._count(raws)
        answers = [each for each in known if isinstance(each, ProbeAnswer)]
        lost = [each for each in known if isinstance(each, LeftOut)]
        self._left_out += lost
        if answers and not self._began:
            self._begin(answers, all_fields)
        for each in lost:
            if each.unsure and not each.prompt.greedy:
                self._drawn.lose()
        reads = self._readings.read(answers)
        if self._likelihood is not None:
            self._likelihood.prepare(reads)
        for read in reads:
            self._judge(read)
            if self.result in _ENDS:
                break
        return self.result

    @property
    def result(self) -> SequentialResult:
        return self._verdict[0]

    @property
    def _verdict(self) -> tuple[SequentialResult, int]:
        """The result, and which of the emulated kernels explains the answers best."""
        found, closest = verdict_of(self._judges)
        few = len(self._answers) < LEAST_JUDGED * (len(self._answers) + len(self._left_out))
        unsure = self._sizes is not None and not self._sizes.can_clear
        if found is SequentialResult.HONEST and (few or unsure):
            return SequentialResult.UNDECIDED, closest
        return found, closest

    @property
    def _judges(self) -> tuple[Standings, ...]:
        more: Sequence[Standings] = self._sizes.judges if self._sizes is not None else ()
        if self._likelihood is not None:
            more = (self._likelihood,)
        return (self._drawn, self._greedy, *more)

    def probed(self, asked: int) -> Probed:
        findings, sizes = self._findings(), self._sizes
        seen = self._diagnosis(findings)
        return Probed(
            judged(self.result, seen, self._more()),
            findings,
            seen,
            tuple(self._answers),
            tuple(self._left_out),
            tuple(sizes.ratios) if sizes else (),
            sizes.unseen if sizes else (),
            tuple(self._evidence),
            self._greedy.bound,
            asked,
            self._readings.forwards,
            *self._used,
        )

    def _diagnosis(self, findings: Sequence[Finding]) -> Diagnosis:
        suspect: str | None = None
        cosines: list[float] = []
        if self.result is SequentialResult.FRAUD:
            if self._sizes is not None:
                suspect, cosines = by_blocks(self._sizes, findings)
            else:
                suspect = by_tokens(self._readings, self._answers)
        ratios = self._sizes.ratios if self._sizes else ()
        drawn = any(not each.answer.prompt.greedy for each in self._answers)
        return Diagnosis(
            suspect,
            float(np.median(ratios)) if ratios else None,
            tuple(cosines),
            surprise_of(self._answers) if drawn else None,
            self._greedy.share,
        )

    def _begin(self, answers: Sequence[ProbeAnswer], all_fields: bool) -> None:
        """Choose the tests by what the first answers have."""
        self._began = True
        logs = any(len(top.ids) > 1 for each in answers for top in each.tops)
        tests = _WITH_LOGS if logs else _WITHOUT_LOGS
        shared = replace(self._chances, alpha=self._chances.alpha / tests)
        self._drawn = TokenJudge(self._readings, shared, all_fields)
        if logs:
            self._sizes = BlockJudges(self._blocks, shared)
        else:
            self._likelihood = LikelihoodJudge(self._readings, shared)

    def _judge(self, read: ReadAnswer) -> None:
        self._answers.append(read)
        self._drawn.add(read)
        self._greedy.add(read)
        self._evidence.append(self._drawn.log_evidence)
        if self._sizes is not None and (errors := self._blocks.add(read)):
            self._sizes.add(errors)
        if self._likelihood is not None:
            self._likelihood.add(read)

    def _findings(self) -> tuple[Finding, ...]:
        closest = self._verdict[1]
        return tuple(judge.finding(closest) for judge in self._judges)

    @property
    def _clearing(self) -> tuple[str, ...]:
        return _LOGS_CLEAR if self._sizes is not None else _TOKENS_CLEAR

    def _more(self) -> str:
        if not self._answers:
            reason = f": {self._left_out[0].reason}" if self._left_out else ""
            return f"no answer can be judged{reason}"
        if len(self._answers) < LEAST_JUDGED * (len(self._answers) + len(self._left_out)):
            return "too many answers had to be left out"
        findings = self._findings()
        number = prompts_more(findings, self._clearing, self._chances, len(self._answers))
        return "nothing yet shows how many more prompts" if number is None else _about(number)

    def _count(self, raws: Sequence[RawAnswer | LeftOut]) -> None:
        for each in raws:
            if isinstance(each, RawAnswer):
                self._used[0] += each.prompt_tokens or 0
                self._used[1] += each.completion_tokens or 0


def probe(
    endpoint: Endpoint,
    prompts: Sequence[ProbePrompt],
    probing: Probing,
    at_once: int,
    progress: Progress,
) -> Probed:
    """Ask group after group, until the verdict is certain or the prompts end.

    Raises LabError if the endpoint refuses every route, NodeError if it does not answer.
    """
    asked, left = 0, list(prompts)
    while left:
        group, left = left[:at_once], left[at_once:]
        progress.step(f"asking prompts {asked + 1} to {asked + len(group)}, {len(left)} left")
        answers = endpoint.ask(group)
        if endpoint.refused:
            # A route that is not there is no answer left out: the other one is asked alone.
            left = [each for each in left if each.kind not in endpoint.refused]
            answers = [each for each in answers if each.prompt.kind not in endpoint.refused]
        if not endpoint.settled:
            raise LabError("; ".join(endpoint.refused.values()))
        asked += len(answers)
        progress.step(f"judging {len(answers)} answers")
        all_fields = all(each.more_fields for each in endpoint.settled.values())
        if probing.add(answers, all_fields) in _ENDS:
            break
    return probing.probed(asked)


def _about(prompts: float) -> str:
    """Two digits are more than such an estimate has."""
    digits = 10 ** max(0, len(str(int(prompts))) - 2)
    return f"about {-(-int(prompts + 1) // digits) * digits} more prompts"
