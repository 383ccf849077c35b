"""The nodes of one model: all are asked at the same time, and judged by passes that they share."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from proofserve.host import GIB, memory_gib
from proofserve.protocol.verdict.nearness import LEAST_NONCES
from proofserve.remote.node_client import (
    BoundedClient,
    NodeClient,
    Transcript,
    Unproved,
    UnprovedError,
    replaying,
)
from proofserve.remote.records import Work
from proofserve.reports import Progress
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import ProofBatch, Workload
from proofserve.verifier.bundle import AnswerRecord, HeardNode, UnsignedError, records_of
from proofserve.verifier.calibration_file import CalibrationFile
from proofserve.verifier.challenge import (
    DESCRIBES_ITSELF_S,
    ChallengeAnswer,
    FreshChallenge,
    answer,
)
from proofserve.verifier.judges import PUBLISHED
from proofserve.verifier.judging import JudgingOptions, VerdictReport, judged, references_on
from proofserve.verifier.nodes.judging import TrustedNodes
from proofserve.verifier.nodes.sources import NodeSource
from proofserve.verifier.orders import workload_of
from proofserve.verifier.validation.ledger import OpenChallenge

if TYPE_CHECKING:
    from proofserve.engines.reference.engine import Run
    from proofserve.engines.reference.network import Network
    from proofserve.verifier.validator import CheckpointValidator, Compute


T = TypeVar("T")
# The runs that each judge waits for, by its name, and what they give.
Asked = Mapping[str, Sequence["Run"]]
Answered = Mapping[str, Sequence[ProofBatch]]
# After so many nonces most honest nodes are cleared, and they are one group: a pass over weights
# costs more than the forwards of a cheat that fewer would have convicted. Where a node may have one
# of several kernels, two nonces go ahead, and choose it.
_CLEARED, _CHOSEN = 28, 2
# The truth, our own run in two orders, and what suspects need; bytes of a value.
_RUNS, _FLOAT32 = 4, 4
Verdict = tuple[HeardNode, VerdictReport]
# Hears how many passes were made, and of a layer, how many there are.
PassedLayer = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class ValidatedNode:
    """A node by its ``name``. If ``public_key`` (hexadecimal) is known, it has to sign with it."""

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)
    public_key: str | None = None


class KeptAnswers(BaseModel):
    """What a node answered to a challenge; ``signed_by`` is the one key of all answers, if any."""

    model_config = ConfigDict(extra="forbid")

    signed_by: str | None
    answers: list[AnswerRecord]

    @classmethod
    def of(cls, heard: HeardNode) -> Self:
        """Raises UnsignedError for an answer that is no text."""
        try:
            signed_by = heard.public_key().hex()
        except UnsignedError:
            signed_by = None
        return cls(signed_by=signed_by, answers=records_of(heard.transcript))

    def read(self, asked: OpenChallenge) -> tuple[HeardNode, ChallengeAnswer]:
        """As when it came: what is judged is what was kept, whenever that is."""
        key = bytes.fromhex(self.signed_by) if self.signed_by else bytes(32)
        every = [each.answer(key) for each in self.answers]
        heard = Transcript()
        for each in every:
            (heard.signed if each.is_signed else heard.unsigned).append(each)
        with NodeClient(asked.url, replayed=replaying(every)) as node:
            found = answer(node, asked.challenge, math.inf)
        return HeardNode(asked.url, heard, asked.challenge), found


def ask(node: ValidatedNode, asked: FreshChallenge, deadline_s: float) -> tuple[KeptAnswers, float]:
    """What ``node`` says of itself and answers, and the seconds of the latter.

    Raises UnprovedError as ``challenge.answer``, and for an answer with another key's signature.
    """
    heard = Transcript()
    with BoundedClient(node.url, node.api_key, DESCRIBES_ITSELF_S, heard) as client:
        seconds = answer(client, asked, deadline_s).seconds
    try:
        kept = KeptAnswers.of(HeardNode(node.url, heard, asked))
    except UnsignedError as error:
        raise UnprovedError(Unproved.UNREADABLE, str(error), seconds) from error
    if node.public_key not in {None, kept.signed_by}:
        text = f"public_key: {node.public_key} is expected, signed is by {kept.signed_by or 'none'}"
        raise UnprovedError(Unproved.OTHER_KEY, text, seconds)
    return kept, seconds


def ask_all(
    asked: Sequence[tuple[ValidatedNode, OpenChallenge]], deadline_s: float
) -> Iterator[tuple[OpenChallenge, Future[tuple[KeptAnswers, float]]]]:
    """All at the same time: who owns several nodes must compute for all of them at once."""
    calls: dict[Future[tuple[KeptAnswers, float]], OpenChallenge] = {}
    for node, of in asked:
        call: Future[tuple[KeptAnswers, float]] = Future()
        calls[call] = of
        work = partial(ask, node, of.challenge, deadline_s)
        # A daemon: after a signal the command ends, and waits for no node.
        Thread(target=fill, args=(call, work), name=f"ask {node.name}", daemon=True).start()
    for call in as_completed(calls):
        yield calls[call], call


def fill(future: Future[T], work: Callable[[], T]) -> Future[T]:
    """Have ``future`` hold what ``work`` returns or raises."""
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - it is raised where the result is taken
        future.set_exception(error)
    return future


def side_by_side(
    judges: Mapping[str, Callable[["Compute"], T]], compute: Callable[[Asked], Answered]
) -> Iterator[tuple[str, Future[T]]]:
    """The end of each judge by its name, as they come.

    Each judge has a thread of its own, and is called with a function that computes its runs.
    ``compute`` is called in the caller's thread, once all judges that have not ended wait for
    their runs. Its EngineFault is raised in all of them; any other error of it, and a caller that
    takes no more, end the judges.
    """
    running = _RunningJudges(left=set(judges))
    with ThreadPoolExecutor(max(1, len(judges)), thread_name_prefix="judge") as threads:
        for name, judge in judges.items():
            ended = threads.submit(judge, partial(running.ask, name))
            ended.add_done_callback(partial(running.end, name))
        try:
            while running.left:
                if (one := running.until_one_ends()) is not None:
                    yield one
                else:
                    running.answer(compute)
        finally:
            while running.left:
                if running.until_one_ends() is None:
                    running.refuse(EngineFault("the validator ends"))


@dataclass(slots=True)
class _RunningJudges:
    """The judges that have not ended, and what those wait for that wait.

    In ``events`` the runs of a judge that has ended are None.
    """

    left: set[str]
    waiting: dict[str, tuple[Sequence["Run"], Future[Any]]] = field(default_factory=dict)
    events: SimpleQueue[tuple[str, Sequence["Run"] | None, Future[Any]]] = field(
        default_factory=SimpleQueue
    )

    def ask(self, name: str, runs: Sequence["Run"]) -> Sequence[ProofBatch]:
        """Called by a judge's thread: what the runs give."""
        waits: Future[Sequence[ProofBatch]] = Future()
        self.events.put((name, runs, waits))
        return waits.result()

    def end(self, name: str, ended: Future[Any]) -> None:
        """Called by a judge's thread."""
        self.events.put((name, None, ended))

    def until_one_ends(self) -> tuple[str, Future[Any]] | None:
        """The next judge that ends; None once all that are left wait."""
        while self.left - self.waiting.keys():
            name, runs, future = self.events.get()
            if runs is None:
                self.left.remove(name)
                return name, future
            self.waiting[name] = runs, future
        return None

    def answer(self, compute: Callable[[Asked], Answered]) -> None:
        try:
            made = compute({name: runs for name, (runs, _) in self.waiting.items()})
        except EngineFault as error:
            self.refuse(error)
            return
        for name, (_, waits) in self.waiting.items():
            waits.set_result(made[name])
        self.waiting.clear()

    def refuse(self, error: EngineFault) -> None:
        for _, waits in self.waiting.values():
            waits.set_exception(error)
        self.waiting.clear()


@dataclass(frozen=True, slots=True)
class ValidatedModel:
    """A model, its ``nodes``, and what judges them: a checkpoint, or other nodes, ``references``.

    ``shape`` is the work that is asked for.
    """

    name: str
    shape: Work
    nodes: tuple[ValidatedNode, ...]
    checkpoint: Path | None = None
    calibration: Path | None = None
    measured: CalibrationFile | None = None
    references: tuple[NodeSource, ...] = ()
    suspects: tuple[Path, ...] = ()
    device: str = "cpu"
    forward_batch: int = 8


@dataclass(slots=True)
class ModelJudge:
    """Judges answers about ``model``; ``options`` are of every verdict but for their alpha.

    ``passes`` counts those over the weights of its checkpoint.
    """

    model: ValidatedModel
    options: JudgingOptions
    passed: PassedLayer
    passes: int = 0

    def verdicts(
        self, answered: Sequence[OpenChallenge]
    ) -> Iterator[tuple[OpenChallenge, Future[Verdict]]]:
        """What is found about each answer, as it is found.

        Of a node the future raises UnprovedError for another checkpoint, and what keeps the
        validator from a verdict: ReportedError, ProtocolError, EngineFault, CheckpointError.
        """
        if (checkpoint := self.model.checkpoint) is None:
            for each in answered:
                yield each, fill(Future(), partial(self._by_nodes, each))
            return
        # Of one block alone are the experts and layers that nodes of a pass have in common.
        blocks: defaultdict[str, list[OpenChallenge]] = defaultdict(list)
        for each in answered:
            blocks[each.challenge.work.block_hash].append(each)
        loaded = self._loaded(checkpoint, workload_of(answered[0].challenge.work))
        for of_block in blocks.values():
            yield from self._by_weights(loaded, of_block)

    def _by_nodes(self, asked: OpenChallenge) -> Verdict:
        heard, found = KeptAnswers.model_validate_json(asked.answers or "").read(asked)
        options = replace(self.options, alpha=asked.alpha)
        sample = asked.seed, max(LEAST_NONCES, len(asked.challenge.nonces))
        nodes = TrustedNodes(self.model.references)
        return heard, nodes.report(found.claimed, found.order, options, sample, Progress())

    def _by_weights(
        self, loaded: "CheckpointValidator", answered: Sequence[OpenChallenge]
    ) -> Iterator[tuple[OpenChallenge, Future[Verdict]]]:
        # It imports torch and transformers, which judging by other nodes does not need.
        from proofserve.engines.reference.engine import ReferenceEngine  # noqa: PLC0415

        work = workload_of(answered[0].challenge.work)
        shared = loaded.with_other()
        published = shared.network(PUBLISHED)
        engine = ReferenceEngine(self.model.forward_batch, self._passed_layer)
        by_name = {str(each.number): each for each in answered}

        def compute(asked: Asked) -> Answered:
            for name, runs in asked.items():
                for run in runs:
                    run.public_key = by_name[name].challenge.work.public_key
            every = [run for runs in asked.values() for run in runs]
            # First what chooses the experts that other runs hold.
            every.sort(key=lambda run: run.network is not published)
            self.passes += 1
            made = engine.compute_all(work, every)
            batches = {id(run): batch for run, batch in zip(every, made, strict=True)}
            return {name: [batches[id(run)] for run in runs] for name, runs in asked.items()}

        of_pass = _nodes_at_once(published, work)
        for start in range(0, len(answered), of_pass):
            some = [*by_name.items()][start : start + of_pass]
            judges = {name: partial(self._judged, shared, each) for name, each in some}
            for name, found in side_by_side(judges, compute):
                yield by_name[name], found

    def _judged(
        self, shared: "CheckpointValidator", asked: OpenChallenge, compute: "Compute"
    ) -> Verdict:
        heard, found = KeptAnswers.model_validate_json(asked.answers or "").read(asked)
        validator = shared.beside(compute)
        ours = validator.as_truth(found.order.width, self.model.forward_batch)
        measured = self.model.measured
        known = measured.references if measured else validator.references
        ran_on = found.claimed.ran_on or {}
        several = len(references_on(ran_on, known, validator.variants)) > 1
        totals = (_CHOSEN, _CLEARED) if several else (_CLEARED,)
        truth = replace(ours, at_once=max(ours.at_once, _CLEARED), totals=totals)
        options = replace(self.options, alpha=asked.alpha)
        return heard, judged(found.claimed, truth, options, asked.seed, None, Progress())

    def _passed_layer(self, index: int, of: int) -> None:
        self.passed(self.passes, index, of)

    def _loaded(self, checkpoint: Path, work: Workload) -> "CheckpointValidator":
        """Raises CheckpointError, and ReportedError for a calibration of another one."""
        from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup  # noqa: PLC0415 - as above

        model = self.model
        setup = ValidatorSetup(checkpoint, model.device, model.suspects)
        loaded = CheckpointValidator(setup.serving_as(model.measured))
        loaded.require(model.measured, work)
        return loaded


def _nodes_at_once(published: "Network", work: Workload) -> int:
    """The nodes of a pass: the states of all their nonces take half of the free memory at most."""
    free = memory_gib()[1] * GIB
    if published.device.type == "cuda":
        import torch  # noqa: PLC0415 - as above

        free = torch.cuda.mem_get_info(published.device)[0]
    values = _CLEARED * work.scheme.sequences_per_nonce * work.seq_len * published.facts.hidden_size
    return max(1, int(free / 2 / (_RUNS * _FLOAT32 * values)))
