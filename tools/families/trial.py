"""What a candidate goes through: servers, one after the other, and what clients see of each.

Its proofs are judged as ``verify`` judges, with a calibration of emulated kernels.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from families.candidates import FAMILIES, FOLDER, KV_FP8, Candidate
from families.results import Judged, Row, Winners
from measuring.nodes import about_calibration
from proofserve.cli.model import Checkpoint
from proofserve.cli.servers import ServerOptions, serving
from proofserve.cli.session import CommandSession
from proofserve.engines.reference.suspects import FP8_CACHE
from proofserve.protocol.nonces import fresh_seed
from proofserve.protocol.verdict.comparison import Claim
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import DistanceWork, Work, vectors_of
from proofserve.reports import NodeError, Progress
from proofserve.verifier.calibration_file import KernelFacts
from proofserve.verifier.chat.conversation import Conversation, ReceiptClient, requests
from proofserve.verifier.chat.statements import NodeFacts
from proofserve.verifier.chat.verification import ChatChecker
from proofserve.verifier.claims import ClaimedArtifacts, kernel_facts
from proofserve.verifier.judges import OWN, Chances, Vectors
from proofserve.verifier.judging import JudgingOptions, judged
from proofserve.verifier.noise import MeasuringPlan, checked, honest_runs, measured_calibration
from proofserve.verifier.orders import workload_of
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, proofs_of
from proofserve_lab.chats import ask_all, chat
from proofserve_lab.check import checks
from proofserve_lab.check.checks import Check
from proofserve_lab.check.end_to_end import (
    R_TARGET,
    Judging,
    RoundWinners,
    artifact_trial,
    distance_trial,
    find,
)
from proofserve_lab.checkpoints import claims_of_model
from proofserve_lab.nodes import computing_round
from proofserve_lab.orders import work_of_scheme
from support.library_node import LibraryNode

# Twice the sliding windows of the small models.
SEQ_LEN: Final = 128
# Answers with receipts, of four blocks each: without a calibration 80 blocks are needed to clear a
# node. Tokens of each, and the seed of their prompts; every second one is greedy.
ANSWERS, ANSWER_TOKENS, SEED = 24, 64, 1
ONE, TWO = "1 rank", "2 ranks"
# An honest node that rounds activations as declared, where vLLM has no kernels for it here.
ROUNDED: Final = "transformers"
FORWARD_BATCH: Final = 8
# Nonces that nodes prove, and those of the calibration, on some of which suspects are measured.
JUDGED: Final = range(48)
CALIBRATED: Final = tuple(range(48, 112))
BANK: Final = 32
# Of each kernel that the calibration is tried without.
LEFT_OUT: Final = 1000


@dataclass(slots=True)
class Trial:
    """Fills ``row``: a step that fails leaves its reason there, and the next one runs."""

    candidate: Candidate
    published: Checkpoint
    session: CommandSession
    row: Row
    claims: dict[str, Sequence[Claim]] = field(default_factory=dict)
    ran_on: dict[str, Mapping[str, object]] = field(default_factory=dict)
    winners: dict[str, RoundWinners] = field(default_factory=dict)
    chats: list[Conversation] = field(default_factory=list)
    measured: list[tuple[KernelFacts, Vectors]] = field(default_factory=list)

    @property
    def served(self) -> Path:
        return self.candidate.served(self.published)

    @property
    def work(self) -> Work:
        return work_of_scheme(self.candidate.scheme, self.published.name, SEQ_LEN, 8)

    @property
    def distance(self) -> DistanceWork:
        return DistanceWork(self.published.name, seq_len=SEQ_LEN, batch_size=8, r_target=R_TARGET)

    @property
    def chats_here(self) -> bool:
        return not self.candidate.by_block

    @contextmanager
    def step(self, name: str) -> Iterator[Callable[[Check], None]]:
        """Collects the checks of a step. What ends it is an error of the row."""
        found = self.row.checks.setdefault(name, [])

        def report(made: Check) -> None:
            found.append(made)
            verdict = {True: "PASS", False: "FAIL", None: "SKIP"}[made.passed]
            self.session.tell(f"{verdict}  {name}: {made.name}  {made.detail}")

        began = time.monotonic()
        try:
            yield report
        except (RuntimeError, ValueError, OSError) as error:
            # ReportedError and what servers, engines and checkpoints raise are among them.
            self.row.errors[name] = str(error)
            self.session.tell(f"{name} ended: {error}", "red")
        self.row.seconds[name] = time.monotonic() - began

    def serving(
        self, folder: Path, options: Sequence[str], ranks: int = 1
    ) -> AbstractContextManager[NodeClient]:
        served = ServerOptions(
            *(folder, self.published.name, FORWARD_BATCH),
            ranks=ranks,
            receipts=self.chats_here,
            vllm_options=tuple(options),
        )
        return serving(served, self.session)

    def prove(self, name: str, node: NodeClient) -> None:
        """Keep the vectors of a node, and the winners that it finds in a distance round."""
        self.claims[name] = node.artifacts(self.work, JUDGED)
        self.ran_on[name] = kernel_facts(name, node.kernels())
        if self.chats_here:
            self.winners[name] = find(node, self.distance)

    def smoke(self, node: NodeClient, report: checks.Reporter) -> None:
        if self.chats_here:
            checks.smoke(node, [self.work, self.distance], report)
        else:
            checks.artifact_smoke(node, self.work, report)

    def chat_beside_proofs(self, node: NodeClient, report: checks.Reporter) -> None:
        """Greedy and sampled answers with seeds are the same tokens beside a round and alone."""
        asked = [
            {**each, "seed": SEED, "cache_salt": "alone"}
            for each in requests(self.published.name, SEED, ANSWERS, ANSWER_TOKENS)
        ]
        with ReceiptClient(node.url) as client:
            alone = client.chats(asked, 1, self.session.line)
            with computing_round(node, self.work):
                again = [{**each, "cache_salt": "beside"} for each in asked]
                self.chats = client.chats(again, 1, self.session.line)
        pairs = zip(alone, self.chats, strict=True)
        same = sum(a.choices[0].token_ids == b.choices[0].token_ids for a, b in pairs)
        report(Check("chat is the same beside proofs", same == ANSWERS, f"{same} of {ANSWERS}"))

    def judge_winners(self, node: NodeClient, report: checks.Reporter) -> None:
        """An honest node judges what other nodes found."""
        for name, found in self.winners.items():
            with node.judging(found.work):
                judgement = node.judge(found.work, found.winners)
            row = Winners(name, judgement.n_invalid, len(found.winners), judgement.fraud_detected)
            self.row.winners.append(row)
            expected = name == self.candidate.cheat
            detail = f"{row.invalid} of {row.of} invalid"
            report(Check(f"distances of {name}", row.fraud is expected, detail))


def tried(candidate: Candidate, session: CommandSession) -> Row:
    """Everything about a candidate, on one server after the other."""
    row = Row(candidate.name)
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    try:
        session.line.step("writing checkpoints")
        trial = Trial(candidate, candidate.honest(folder), session, row)
        if candidate.refused:
            _refused(trial)
            return row
        if candidate.inputs is not None:
            with trial.step(ROUNDED):
                other = LibraryNode(trial.published.folder, trial.served, candidate.inputs)
                trial.claims[ROUNDED] = other.claims(workload_of(trial.work), JUDGED, FORWARD_BATCH)
        is_family = candidate.name in FAMILIES
        _other_nodes(trial, candidate.cheating(trial.published, folder), is_family)
        if judges := _first_node(trial, is_family):
            # A second start of the server judges what the first one proved.
            options = candidate.vllm_options
            with trial.step("e2e") as report, trial.serving(trial.served, options) as node:
                for judge in judges:
                    judge(node, "after a restart", report)
        _verdicts(trial)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return row


def _refused(trial: Trial) -> None:
    """The server chats, and refuses every proof by the words that are expected."""
    work = trial.work
    with trial.step("refusal") as report, trial.serving(trial.served, ()) as node:
        trial.row.vllm = node.versions()["vllm"]
        (reply,) = ask_all(node.url, [chat(work.model, "Say something.", 8)], 1)
        report(Check("chat answers", reply.error is None, reply.error or "8 tokens"))
        try:
            node.artifacts(work, JUDGED)
            said = "it proved"
        except NodeError as error:
            said = str(error)
        report(Check("proofs are refused", trial.candidate.refused in said, said))


def _other_nodes(trial: Trial, cheat: Path, is_family: bool) -> None:
    candidate, options = trial.candidate, trial.candidate.vllm_options
    of_cheat = KV_FP8 if candidate.cheat == FP8_CACHE else options
    with trial.step(candidate.cheat), trial.serving(cheat, of_cheat) as node:
        trial.prove(candidate.cheat, node)
    if candidate.measured:
        with trial.step("measured"), trial.serving(trial.served, options) as node:
            facts = KernelFacts.model_validate(kernel_facts("a node", node.kernels()))
            sent = vectors_of(node.artifacts(trial.work, CALIBRATED), trial.work.width)
            trial.measured.append((facts, sent))
    if not is_family:
        return
    with trial.step(TWO) as report, trial.serving(trial.served, options, 2) as node:
        trial.smoke(node, report)
        trial.prove(TWO, node)


def _first_node(trial: Trial, is_family: bool) -> list[Judging]:
    """Every check of one server; what judges its proofs after a restart, of a family alone."""
    judges: list[Judging] = []
    with trial.step("start"), trial.serving(trial.served, trial.candidate.vllm_options) as node:
        trial.row.vllm = node.versions()["vllm"]
        with trial.step("smoke") as report:
            trial.smoke(node, report)
        with trial.step("proofs"):
            trial.prove(ONE, node)
        if trial.chats_here:
            with trial.step("chat") as report:
                trial.chat_beside_proofs(node, report)
        if is_family and trial.chats_here:
            with trial.step("coexist") as report:
                checks.coexist(node, trial.work, report)
        with trial.step("distance") as report:
            trial.judge_winners(node, report)
        if is_family:
            with trial.step("e2e") as report:
                foreign = partial(claims_of_model, trial.published.folder, trial.work, redrawn=True)
                judges.append(artifact_trial(trial.work, foreign, node, report))
                if trial.chats_here:
                    judges.append(distance_trial(trial.distance, node, report))
    return judges


def _verdicts(trial: Trial) -> None:
    candidate, row = trial.candidate, trial.row
    if not trial.claims:
        return
    with trial.step("verify"), trial.session.interrupts.allowed():
        known = candidate, trial.published.folder, trial.work, trial.measured
        validator = Validator(*known, trial.session.line)
        for name in sorted(trial.claims):
            said = trial.ran_on.get(name, {})
            row.judged.append(validator.judged(name, trial.claims[name], said))
            trial.session.tell(str(row.judged[-1]))
    if trial.chats:
        with trial.step("receipts") as report, trial.session.interrupts.allowed():
            report(receipts_hold(trial.published.folder, trial.chats, trial.session.line))


class Validator:
    """Judges nodes of one checkpoint. Making it measures the calibration (minutes).

    ``measured`` has what honest servers sent for ``CALIBRATED``.
    """

    def __init__(
        self,
        candidate: Candidate,
        folder: Path,
        work: Work,
        measured: Sequence[tuple[KernelFacts, Vectors]],
        progress: Progress,
    ) -> None:
        load = workload_of(work)
        self._work, self._progress = work, progress
        setup = ValidatorSetup(folder, kv_dtype=candidate.kv_dtype)
        self._validator = made = CheckpointValidator(setup, proofs_of(load, FORWARD_BATCH))
        self._truth = made.as_truth(load.scheme.width, FORWARD_BATCH)
        plan = MeasuringPlan(CALIBRATED, len(CALIBRATED), BANK)
        runs = honest_runs(measured, made.truth(CALIBRATED))
        said = about_calibration(work.model, load, candidate.kv_dtype)
        known = checked(measured_calibration(made, runs, plan, said, progress), progress, LEFT_OUT)
        self._options = JudgingOptions(threshold=known)

    def judged(self, name: str, claims: Sequence[Claim], ran_on: Mapping[str, object]) -> Judged:
        """The verdict about what a node proved, and says it ran on, as ``verify`` reaches it."""
        work, nonces = self._work, tuple(JUDGED)
        claimed = ClaimedArtifacts(
            *(work.block_hash, work.public_key, nonces, tuple(claims)),
            scheme=work.scheme,
            ran_on=ran_on,
        )
        report = judged(claimed, self._truth, self._options, fresh_seed(), None, self._progress)
        found, own = vectors_of(claims, work.width), self._validator.errors(OWN, nonces)
        truth = self._validator.truth(nonces)
        errors = np.array([np.linalg.norm(found[n] - truth[n]) for n in nonces])
        usual = np.array([np.linalg.norm(own[n]) for n in nonces])
        return Judged(
            node=name,
            verdict=str(report.outcome.verdict),
            nonces=report.outcome.nonces_used,
            size=float(np.median(errors / usual)),
            error=float(np.median(errors)),
            most=float(errors.max()),
            closest=report.closest,
        )


def receipts_hold(model: Path, chats: Sequence[Conversation], progress: Progress) -> Check:
    """The verdict of `verify-chat` without a calibration."""
    checker = ChatChecker(ValidatorSetup(model), None, fresh_seed())
    known, chances = NodeFacts(checker.weights_digest), Chances()
    found = checker.outcome(chats, known, chances, progress)
    said = [f"{each.check}: {each.text}" for each in found.failures]
    said += [f"{each.test} {each.result}: {each.text}" for each in found.opinions]
    passed = found.verdict is SequentialResult.HONEST and not found.gaps
    return Check("receipts", passed, f"{found.verdict}; {'; '.join(said)}")
