"""``proofserve verify``: whether a node runs the model that it claims."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from proofserve.cli.command import ApiKey, verdict_command
from proofserve.cli.recompute import tell_plan_of_verdict, trusted_engine, warn_of_few_values
from proofserve.cli.servers import vllm_ranks
from proofserve.cli.session import EXIT_CODES, CommandSession
from proofserve.cli.validator.options import (
    PlanOptions,
    ProofChanceOptions,
    RecomputationOptions,
    ReportOptions,
    ThresholdOptions,
    WitnessOptions,
    needed_without_plan,
)
from proofserve.client.judging import Judging, claimed_order, claims_of, unproved_record
from proofserve.protocol import DEFAULT_SCHEME, SEQ_LEN, SKETCH_2
from proofserve.protocol.nonces import NonceLane, fresh_seed
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.node_client import NodeClient, Transcript, UnprovedError
from proofserve.remote.records import Work
from proofserve.reports import ReportedError
from proofserve.verifier.bundle import HeardNode, write_bundle
from proofserve.verifier.calibration_file import threshold_of
from proofserve.verifier.claims import ClaimedArtifacts, Selection
from proofserve.verifier.judging import (
    COUNT,
    EXACT,
    TESTS,
    ChosenTests,
    JudgingOptions,
    VerdictReport,
    chosen_tests,
    exactly_judged,
    judged,
)
from proofserve.verifier.nodes.sources import is_url
from proofserve.verifier.openings import PATIENCE_S, SAMPLE, open_sample, read_committed
from proofserve.verifier.orders import WorkOptions, workload_of
from proofserve.verifier.verification import leaves_open

app = typer.Typer()

BELIEVED = "Block and key are believed as {source} says; --expect-block and --expect-key check."
ENGINES_DIFFER = (
    "Other bits decide nothing. For the other tests give --model and --calibration, or"
    " --dist-threshold."
)
GIVEN_SEED = "The seed was given: this holds only if the node did not know it before it published."
# What a bundle cannot hold.
_NOT_BUNDLED = (
    *("open_url", "recompute_url", "engine", "plan"),
    # Only the validator knows whether the node was asked for this.
    *("lane", "stronger_rng"),
)


def lane_of(text: str) -> NonceLane:
    """The lane FIRST:STEP. Raises typer.BadParameter."""
    first, _, step = text.partition(":")
    try:
        return NonceLane(int(first), int(step or "1"))
    except ValueError as error:
        how = "give FIRST:STEP with FIRST below STEP, such as 3:8; 0:1 for all nonces"
        raise typer.BadParameter(f"{text!r}: {how}") from error


class VerifyOptions(
    WitnessOptions,
    RecomputationOptions,
    ThresholdOptions,
    ProofChanceOptions,
    ReportOptions,
    PlanOptions,
):
    source: Annotated[str | None, typer.Argument(callback=needed_without_plan)] = None
    """A JSON file, a file of `proofserve receive`, or a node's URL. --plan needs none."""
    open_url: Annotated[str | None, typer.Option("--open")] = None
    """SOURCE has roots: this node, which posted them, opens them."""
    round_id: str | None = None
    """With --open: the round, if SOURCE has roots of several."""
    model: Path | None = None
    """Recompute with this checkpoint; needs no vLLM."""
    recompute_url: str | None = None
    """Recompute on this node, which you trust; with --model, for exact."""
    recompute_api_key: Annotated[str | None, typer.Option(envvar="POC_RECOMPUTE_API_KEY")] = None
    """A key of that node."""
    engine: str | None = None
    """For exact: vllm or vllm:tp2, which this command starts with --model."""
    test: tuple[str, ...] = Field(
        (), description=f"One or several of {', '.join((EXACT, *TESTS))}; see below if unset."
    )
    api_key: ApiKey = None
    scheme: str | None = Field(
        None, description=f"{DEFAULT_SCHEME}, {SKETCH_2}, ...; else the source's, or the first."
    )
    stronger_rng: bool = False
    """256-bit seeds; with artifact-v1-layers."""
    seq_len: int | None = Field(None, ge=1)
    """Tokens per nonce, if the source does not say."""
    k_dim: int | None = Field(None, ge=1)
    """Values per vector; else the source's, or the scheme's own number. If you say it, every vector
    of another width is a mismatch."""
    block_height: int | None = Field(None, ge=0)
    """For sketches, if the source does not say."""
    lane: Annotated[NonceLane | None, typer.Option(parser=lane_of, metavar="FIRST:STEP")] = None
    """The nonces that were owed, up to the last claimed one: FIRST, FIRST + STEP, ..."""
    block_hash: Annotated[str | None, typer.Option("--block-hash", "--expect-block")] = None
    """The block that the network expects; of several in the source, the one to judge."""
    public_key: Annotated[str | None, typer.Option("--public-key", "--expect-key")] = None
    """The key that the network expects; of several in the source, the one to judge."""
    seed: str | None = None
    """Draw the sample that this seed drew before, to reproduce a verdict. If unset, a new one: a
    node that knows the seed invents the nonces that it does not draw."""
    nonces: int | None = Field(None, ge=1)
    """Size of the sample; if unset all nonces, 64 with --reference."""
    sequential: Annotated[bool, typer.Option("--sequential/--fixed")] = True
    """The count: stop when certain, or at the end."""
    p_fraud: float = 0.5
    """The count: least share of mismatches by a fraudulent node."""

    @property
    def is_file(self) -> bool:
        return self.open_url is None and not is_url(self.source or "")

    def require_together(self) -> None:
        """Raise ReportedError, which says what to give, for options that do not go together."""
        if self.bundle is not None:
            self._require_bundled()
        if self.reference and self.model is None:
            return
        if self.model is None and self.recompute_url is None:
            raise ReportedError("give --model CHECKPOINT, --recompute-url NODE, or both")
        if self.plan and self.model is None:
            raise ReportedError("--plan: it is about a checkpoint; give --model")
        if self.recompute_url is not None and self.recompute_url in {self.source, self.open_url}:
            raise ReportedError("--recompute-url: a node is no judge of itself; name another one")
        if self.engine is not None and (self.model is None or self.recompute_url is not None):
            raise ReportedError(
                "--engine serves the checkpoint of --model; leave --recompute-url out"
            )
        if self.engine is not None and vllm_ranks(self.engine) is None:
            raise ReportedError(f"--engine {self.engine}: give vllm, or vllm:tp2 for two ranks")

    def _require_bundled(self) -> None:
        """Raises ReportedError if a verdict rests on more than a node's answers and weights."""
        if used := next((name for name in _NOT_BUNDLED if getattr(self, name)), None):
            option = used.removesuffix("_url").replace("_", "-")
            text = "it holds a node's own answers, and a verdict by --model or by nodes that sign"
            raise ReportedError(f"--bundle: {text}, without --{option}")
        if self.is_file:
            raise ReportedError(
                "--bundle: SOURCE must be a node's URL: what a file says is not signed"
            )

    def chosen(self) -> tuple[ChosenTests, Judging]:
        """The tests that run, and what they judge by. A plan needs to know nothing of honest nodes.

        Raises ReportedError for tests that cannot run, and as ``nodes``.
        """
        nodes = self.nodes({self.source, self.open_url})
        self.require_together()
        has_engine = self.recompute_url is not None or self.engine is not None
        has_figures = self.dist_threshold is not None or self.calibration is not None
        tests = chosen_tests(self.test, has_engine=has_engine, has_figures=has_figures)
        if self.model is not None and has_engine and not tests.exact:
            raise ReportedError(
                "--test: only exact asks an engine beside --model; add --test exact"
            )
        threshold = None
        if tests.judges and (has_figures or not self.plan):
            figures = self.dist_threshold, self.calibration, self.p_mismatch
            threshold = threshold_of(*figures, needed=COUNT in tests.others)
        numbers = self.alpha, self.beta, self.share, self.p_fraud, self.sequential
        options = JudgingOptions(tests.others, *numbers, threshold)
        return tests, self.judging(self.model, nodes, options)


@verdict_command(app, "verify")
def verify(given: VerifyOptions, session: CommandSession) -> int:
    """Recompute a sample of a node's artifacts, and reach a verdict: honest or fraud.

    Exit code 0: honest. 1: fraud. 2: undecided, because there were too few
    nonces, or exact ran alone and the bits differ; or unproved, because the node
    owes what it does not show: it refuses, is late or away, or has another
    checkpoint. 3: no verdict: an option, a source or the recomputation is wrong,
    or neither an honest kernel nor a fraud that is known explains the errors.

    A node chooses what it says of block and key: name those that the network
    expects. `proofserve challenge` has a node compute what it cannot know before.

    The published vectors are computed in float32. Beside each, the validator
    emulates the honest kernel that is most like the node:

    \b
    footprint  does the node's error point where this kernel errs? It clears
    direction  is the error shorter without what suspected weights, such as
               rounded ones, would add? It clears, or convicts and names them
    paired     is it more than twice as long as those of the calibration's
               kernels? It convicts
    count      how many distances exceed a threshold? The network's own test
    exact      has an engine that you trust the same bits? It is the node at
               --recompute-url, or a vLLM that --engine starts, and it runs first

    Equal bits clear a node, whatever the model. Other bits say nothing, because
    honest engines differ: then the other tests judge, as if exact had not run.

    By default footprint and direction run, with a calibration paired too, and
    with a threshold alone only the count. A node whose kernel is emulated badly
    has no verdict until a calibration, or a --reference, is of its kind.

    A missing, repeated, malformed or non-finite artifact is a mismatch. So is a
    nonce of the lane that is left out below the last claimed one. A node and
    roots say their lane; for a receiver's vectors, or a file without node_count,
    give --lane: without it no node is cleared by artifact-v1, whose inputs depend
    on 32 bits, so that a node that chooses nonces can answer from a store.

    With --reference, twice or more, other nodes take the place of the weights: the
    node is convicted if it is farther from them than they are from each other, or
    if its errors lean to those of a --suspect-node; it is cleared by equal bits
    with one of them, or if it is as near as they are. Give three on
    two generations of cards or more: beside one generation nothing convicts, and
    two convict by a suspect alone, and clear by bits alone.

    With --model and --reference, once or more, these nodes count as measured honest
    ones: the node is cleared by the bits of one, or by its footprint if no emulated
    kernel has it, and not convicted by what one explains; paired runs without a
    calibration. The checkpoint judges them first, and leaves out one that it
    convicts.

    There is no default threshold.

    \b
    proofserve calibrate noise ./model --out calibration.json
    proofserve verify --plan --model ./model --scheme sketch-v2
    proofserve verify artifacts.json --model ./model --calibration calibration.json
    proofserve verify received.sqlite --lane 0:1 --model ./model
        --calibration calibration.json
    proofserve verify http://node:8000 --model ./model --dist-threshold 0.026 --p-mismatch 0.01
    proofserve verify http://node:8000 --model ./model --suspect ./model-awq
    proofserve verify http://node:8000 --model ./model-awq --reference http://mine:8000
    proofserve verify received.sqlite --open http://node:8000 --model ./model
        --calibration calibration.json
    proofserve verify http://node:8000 --reference http://mine:8000
        --reference http://yours:8000 --reference theirs.json
        --suspect-node awq=http://mine-in-4-bits:8000
    proofserve verify http://node:8000 --recompute-url http://mine:8000         (exact alone)
    proofserve verify http://node:8000 --model ./model --engine vllm
        --calibration calibration.json
    """
    wanted, heard = Selection(given.block_hash, given.public_key, given.lane), Transcript()
    tests, judging = given.chosen()
    sample = given.seed or fresh_seed(), given.nonces
    try:
        claimed = _claimed(given, wanted, heard, sample, session)
        asked = WorkOptions(
            given.scheme, given.k_dim, given.seq_len, given.block_height, given.stronger_rng
        )
        measured = judging.options.calibration
        order = claimed_order(claimed, asked, measured, is_file=given.is_file)
        if given.plan:
            _tell_plan(judging, claimed, order, given.nonces, session)
            return 0
        report = _report(given, tests, judging, (claimed, order), sample, session)
    except UnprovedError as error:
        session.show(SequentialResult.UNPROVED, [f"{error.kind}: {error}"])
        given.write(unproved_record(error))
        return EXIT_CODES[SequentialResult.UNPROVED]
    node = HeardNode(str(given.source), heard, wanted=wanted)
    judged_with = given.calibration, given.suspect
    kept = write_bundle(given.bundle, node, report, given.nonces, judged_with, judging.nodes)
    differ = not tests.judges and leaves_open(report.outcome)
    notes = (*_notes(differ, given.seed, wanted, str(given.source)), kept)
    session.show(report.outcome.verdict, filter(None, (*report.lines(), *notes)))
    given.write({**report.record(), "expected": asdict(wanted)})
    return EXIT_CODES[report.outcome.verdict]


def _notes(engines_differ: bool, seed: str | None, wanted: Selection, source: str) -> Iterator[str]:
    """What a reader must know of how the verdict came about."""
    if engines_differ:
        yield ENGINES_DIFFER
    if seed:
        yield GIVEN_SEED
    if None in {wanted.block_hash, wanted.public_key}:
        yield BELIEVED.format(source=source)


def _claimed(
    given: VerifyOptions,
    wanted: Selection,
    heard: Transcript,
    sample: tuple[str, int | None],
    session: CommandSession,
) -> ClaimedArtifacts:
    """What the source claims, or what a node opens of the roots in it, or what a plan imagines."""
    if given.source is None:
        session.line.step("loading torch")
        usual = SEQ_LEN if given.seq_len is None and given.calibration is None else None
        numbers, height = tuple(range(given.nonces or SAMPLE)), given.block_height or 0
        return ClaimedArtifacts("", "", numbers, (), seq_len=usual, block_height=height)
    session.line.step(f"reading {given.source}")
    if given.open_url is None:
        return claims_of(given.source, given.api_key, wanted, heard)
    roots = read_committed(Path(given.source), wanted, given.round_id)
    with NodeClient(given.open_url, given.api_key, timeout_s=PATIENCE_S) as node:
        return open_sample(roots, node, sample[0], sample[1] or SAMPLE, session.line)


def _tell_plan(
    judging: Judging,
    claimed: ClaimedArtifacts,
    order: Work,
    most: int | None,
    session: CommandSession,
) -> None:
    warn_of_few_values(order, session)
    sample = min(most or len(claimed.nonces), len(claimed.nonces))
    tell_plan_of_verdict(judging, order, sample, claimed.ran_on or {}, session)


def _report(
    given: VerifyOptions,
    tests: ChosenTests,
    judging: Judging,
    claims: tuple[ClaimedArtifacts, Work],
    sample: tuple[str, int | None],
    session: CommandSession,
) -> VerdictReport:
    """The verdict: by an engine's bits alone, or by other tests where they decide nothing.

    ``claims`` are of an order; ``sample`` is the seed that draws it, and how many nonces it has at
    most. Raises ReportedError for another checkpoint than the prover's and for tests that cannot be
    run, and the errors of servers, nodes, checkpoints and engines.
    """
    claimed, order = replace(claims[0], scheme=claims[1].scheme), claims[1]
    options, exact = judging.options, None
    name, key = given.engine or str(given.recompute_url), given.recompute_api_key
    if tests.exact:
        # The server stops before a checkpoint is loaded: a card may not have room for both.
        with trusted_engine(name, key, judging, workload_of(order), session) as (truth, _):
            exact = exactly_judged(claimed, truth, options, *sample, session.line)
        if not (tests.judges and leaves_open(exact.outcome)):
            return exact
    if judging.model is None and judging.nodes is None:
        work = workload_of(order)
        with trusted_engine(name, key, judging, work, session) as (truth, models):
            if measured := options.calibration:
                measured.require(work, models, None, truth.weights_digest)
            others = judged(claimed, truth, options, *sample, session.line)
    else:
        if judging.model is not None:
            _tell_plan(judging, claimed, order, sample[1], session)
        others = judging.judge_of(order, session.line)(claimed, order, sample)
    return others.after(exact) if exact else others
