"""The verdicts about answers that nodes of one model gave, by passes that they share."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from proofserve.host import GIB, memory_gib
from proofserve.protocol.verdict.nearness import LEAST_NONCES
from proofserve.remote.records import Work
from proofserve.reports import Progress
from proofserve.rounds.records import Workload
from proofserve.verifier.bundle import HeardNode
from proofserve.verifier.calibration_file import CalibrationFile, checkpoint_shape
from proofserve.verifier.judges import PUBLISHED
from proofserve.verifier.judging import JudgingOptions, VerdictReport, judged, references_on
from proofserve.verifier.nodes.judging import judged_by_nodes
from proofserve.verifier.nodes.sources import NodeSource, witnesses_of
from proofserve.verifier.orders import workload_of
from proofserve.verifier.validation.asking import KeptAnswers, ValidatedNode
from proofserve.verifier.validation.ledger import OpenChallenge
from proofserve.verifier.validation.passes import Answered, Asked, fill, side_by_side

if TYPE_CHECKING:
    from proofserve.engines.reference.network import Network
    from proofserve.verifier.validator import CheckpointValidator, Compute

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

    The checkpoint is loaded at the first answer. ``passes`` counts those over its weights.
    """

    model: ValidatedModel
    options: JudgingOptions
    passed: PassedLayer
    passes: int = 0
    _loaded: "CheckpointValidator | None" = field(default=None, init=False)

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
        for of_block in blocks.values():
            yield from self._by_weights(checkpoint, of_block)

    def _by_nodes(self, asked: OpenChallenge) -> Verdict:
        heard, found = KeptAnswers.model_validate_json(asked.answers or "").read(asked)
        options = replace(self.options, alpha=asked.alpha)
        most = max(LEAST_NONCES, len(asked.challenge.nonces))
        references = self.model.references
        drawn, order = (asked.seed, most), found.order
        known = witnesses_of(found.claimed, order, references, (), drawn, Progress())
        return heard, judged_by_nodes(found.claimed, known, options, asked.seed)

    def _by_weights(
        self, checkpoint: Path, answered: Sequence[OpenChallenge]
    ) -> Iterator[tuple[OpenChallenge, Future[Verdict]]]:
        # It imports torch and transformers, which judging by other nodes does not need.
        from proofserve.engines.reference.engine import ReferenceEngine  # noqa: PLC0415

        work = workload_of(answered[0].challenge.work)
        shared = self._validator(checkpoint, work).with_other()
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
        several = len(references_on(ran_on, known, validator.parallel)) > 1
        totals = (_CHOSEN, _CLEARED) if several else (_CLEARED,)
        truth = replace(ours, at_once=max(ours.at_once, _CLEARED), totals=totals)
        options = replace(self.options, alpha=asked.alpha)
        return heard, judged(found.claimed, truth, options, asked.seed, None, Progress())

    def _passed_layer(self, index: int, of: int) -> None:
        self.passed(self.passes, index, of)

    def _validator(self, checkpoint: Path, work: Workload) -> "CheckpointValidator":
        """Raises CheckpointError, and ReportedError for a calibration of another one."""
        from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup  # noqa: PLC0415 - as above

        if self._loaded is None:
            model, measured = self.model, self.model.measured
            setup = ValidatorSetup(checkpoint, model.device, model.suspects)
            loaded = CheckpointValidator(setup.serving_as(measured))
            if measured is not None:
                about = [checkpoint.name], checkpoint_shape(checkpoint), loaded.weights_digest
                measured.require(work, *about, loaded.is_dense)
            self._loaded = loaded
        return self._loaded


def _nodes_at_once(published: "Network", work: Workload) -> int:
    """The nodes of a pass: the states of all their nonces take half of the free memory at most."""
    free = memory_gib()[1] * GIB
    if published.device.type == "cuda":
        import torch  # noqa: PLC0415 - as above

        free = torch.cuda.mem_get_info(published.device)[0]
    values = _CLEARED * work.scheme.sequences_per_nonce * work.seq_len * published.facts.hidden_size
    return max(1, int(free / 2 / (_RUNS * _FLOAT32 * values)))
