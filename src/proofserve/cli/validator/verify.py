"""``proofserve verify``: whether a node runs the model that it claims."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from proofserve.cli import options
from proofserve.cli.session import EXIT_NO_VERDICT, CommandSession, VerdictCommand, open_session
from proofserve.cli.validator.by_nodes import given_nodes
from proofserve.protocol import DEFAULT_SCHEME, SEQ_LEN, SKETCH_2
from proofserve.protocol.nonces import NonceLane, fresh_seed
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.remote.node_client import NodeClient, Transcript, UnprovedError
from proofserve.remote.records import Work
from proofserve.reports import ReportedError, write_json
from proofserve.rounds.records import Workload
from proofserve.verifier.bundle import HeardNode, write_bundle
from proofserve.verifier.calibration_file import CalibrationFile, GivenThreshold
from proofserve.verifier.claims import ClaimedArtifacts, Selection, from_node, read_file
from proofserve.verifier.judges import ALPHA, BETA, SHARE
from proofserve.verifier.judging import (
    EXACT,
    TESTS,
    ChosenTests,
    JudgingOptions,
    chosen_tests,
    threshold_of,
)
from proofserve.verifier.nodes.beside_checkpoint import TrustedNodes
from proofserve.verifier.openings import PATIENCE_S, SAMPLE, open_sample, read_committed
from proofserve.verifier.orders import WorkOptions, order_of, require_width, workload_of
from proofserve.verifier.verification import leaves_open

if TYPE_CHECKING:
    from proofserve.cli.recompute import EngineOptions

app = typer.Typer()

EXIT_CODES = {
    SequentialResult.HONEST: 0,
    SequentialResult.FRAUD: 1,
    SequentialResult.UNDECIDED: 2,
    SequentialResult.UNPROVED: 2,
    SequentialResult.UNEXPLAINED: EXIT_NO_VERDICT,
}
COLOURS = {
    SequentialResult.HONEST: "green",
    SequentialResult.FRAUD: "red",
    SequentialResult.UNDECIDED: "yellow",
    SequentialResult.UNPROVED: "yellow",
    SequentialResult.UNEXPLAINED: "yellow",
}
BELIEVED = "Block and key are believed as {source} says; --expect-block and --expect-key check."
ENGINES_DIFFER = (
    "Other bits decide nothing. For the other tests give --model and --calibration, or"
    " --dist-threshold."
)
GIVEN_SEED = "The seed was given: this holds only if the node did not know it before it published."


def lane_of(text: str) -> NonceLane:
    """The lane FIRST:STEP. Raises typer.BadParameter."""
    first, _, step = text.partition(":")
    try:
        return NonceLane(int(first), int(step or "1"))
    except ValueError as error:
        how = "give FIRST:STEP with FIRST below STEP, such as 3:8; 0:1 for all nonces"
        raise typer.BadParameter(f"{text!r}: {how}") from error


@app.command("verify", cls=VerdictCommand)
def command(
    ctx: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            callback=options.needed_without_plan,
            help="A JSON file, a file of `proofserve receive`, or a node's URL. --plan needs none.",
        ),
    ] = None,
    open_url: Annotated[
        str | None,
        typer.Option("--open", help="SOURCE has roots: this node, which posted them, opens them."),
    ] = None,
    round_id: Annotated[
        str | None, typer.Option(help="With --open: the round, if SOURCE has roots of several.")
    ] = None,
    calibration: options.Calibration = None,
    dist_threshold: options.DistThreshold = None,
    model: Annotated[
        Path | None, typer.Option(help="Recompute with this checkpoint; needs no vLLM.")
    ] = None,
    reference: options.References = None,
    suspect_node: options.SuspectNodes = None,
    reference_api_key: options.ReferenceApiKey = None,
    recompute_url: Annotated[
        str | None,
        typer.Option(help="Recompute on this node, which you trust; with --model, for exact."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="For exact: vllm or vllm:tp2, which this command starts with --model."),
    ] = None,
    test: Annotated[
        list[str] | None,
        typer.Option(help=f"One or several of {', '.join((EXACT, *TESTS))}; see below if unset."),
    ] = None,
    suspect: options.Suspects = None,
    api_key: options.ApiKey = None,
    recompute_api_key: Annotated[
        str | None, typer.Option(envvar="POC_RECOMPUTE_API_KEY", help="A key of that node.")
    ] = None,
    device: options.Device = "cpu",
    forward_batch: options.ForwardBatch = 8,
    scheme: Annotated[
        str | None,
        typer.Option(help=f"{DEFAULT_SCHEME}, {SKETCH_2}, ...; else the source's, or the first."),
    ] = None,
    stronger_rng: options.StrongerRng = False,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens per nonce, if the source does not say.", min=1)
    ] = None,
    k_dim: Annotated[
        int | None,
        typer.Option(
            help="Values per vector; else the source's, or the scheme's own number. If you say it,"
            " every vector of another width is a mismatch.",
            min=1,
        ),
    ] = None,
    block_height: options.BlockHeight = None,
    lane: Annotated[
        NonceLane | None,
        typer.Option(
            parser=lane_of,
            metavar="FIRST:STEP",
            help="The nonces that were owed, up to the last claimed one: FIRST, FIRST + STEP, ...",
        ),
    ] = None,
    block_hash: Annotated[
        str | None,
        typer.Option(
            "--block-hash",
            "--expect-block",
            help="The block that the network expects; of several in the source, the one to judge.",
        ),
    ] = None,
    public_key: Annotated[
        str | None,
        typer.Option(
            "--public-key",
            "--expect-key",
            help="The key that the network expects; of several in the source, the one to judge.",
        ),
    ] = None,
    seed: Annotated[
        str | None,
        typer.Option(
            help="Draw the sample that this seed drew before, to reproduce a verdict. If unset, a"
            " new one: a node that knows the seed invents the nonces that it does not draw."
        ),
    ] = None,
    nonces: Annotated[
        int | None,
        typer.Option(help="Size of the sample; if unset all nonces, 64 with --reference.", min=1),
    ] = None,
    sequential: Annotated[
        bool,
        typer.Option("--sequential/--fixed", help="The count: stop when certain, or at the end."),
    ] = True,
    p_mismatch: options.PMismatch = None,
    p_fraud: Annotated[
        float, typer.Option(help="The count: least share of mismatches by a fraudulent node.")
    ] = 0.5,
    alpha: options.Alpha = ALPHA,
    beta: options.Beta = BETA,
    share: options.Share = SHARE,
    plan: options.Plan = False,
    json: options.Json = None,
    bundle: options.BundleFile = None,
) -> None:
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
    with open_session(EXIT_NO_VERDICT) as session, _unproved(session, json):
        places, others = {source, open_url}, (reference, suspect_node, reference_api_key)
        nodes = given_nodes(*others, ctx.params, places)
        _require_bundled(bundle, source, ctx.params)
        heard = Transcript()
        setup = model, recompute_url, engine, device, forward_batch, suspect, recompute_api_key
        judge = nodes if nodes and model is None else _engines(places, *setup, nodes)
        trusts_engine = recompute_url is not None or engine is not None
        figures = dist_threshold, calibration, p_mismatch
        tests, threshold = _tests(test or (), trusts_engine, figures, plan)
        judging = JudgingOptions(tests.others, alpha, beta, share, p_fraud, sequential, threshold)
        wanted = Selection(block_hash, public_key, lane)
        sample = seed or fresh_seed(), nonces
        with session.interrupts.allowed():
            session.line.step(f"reading {source}" if source else "loading torch")
            if source is None:
                claimed = _imagined(nonces or SAMPLE, seq_len, calibration, block_height)
            elif open_url is None:
                claimed = _read(source, api_key, wanted, heard)
            else:
                opened = open_url, api_key, round_id
                claimed = _opened(Path(source), wanted, opened, sample, session)
        given = WorkOptions(scheme, k_dim, seq_len, block_height, stronger_rng)
        is_file = open_url is None and not _is_url(source or "")
        order = _order_of(claimed, given, judging.calibration, is_file)
        if isinstance(judge, TrustedNodes):
            with session.interrupts.allowed():
                report = judge.report(claimed, order, judging, sample, session.line)
        elif plan:
            _end_with_plan(judge, claimed, workload_of(order), (judging, nonces), session)
        else:
            report = judge.report(claimed, workload_of(order), tests, judging, sample, session)
        differ = not tests.judges and leaves_open(report.outcome)
        node = HeardNode(str(source), heard, wanted=wanted)
        kept = write_bundle(bundle, node, report, nonces, (calibration, suspect or ()), nodes)
        notes = *_notes(differ, seed, wanted, str(source)), kept
        show(session, report.outcome.verdict, filter(None, (*report.lines(), *notes)))
        if json is not None:
            write_json(json, {**report.record(), "expected": asdict(wanted)})
    raise typer.Exit(EXIT_CODES[report.outcome.verdict])


def _notes(engines_differ: bool, seed: str | None, wanted: Selection, source: str) -> Iterator[str]:
    """What a reader must know of how the verdict came about."""
    if engines_differ:
        yield ENGINES_DIFFER
    if seed:
        yield GIVEN_SEED
    if None in {wanted.block_hash, wanted.public_key}:
        yield BELIEVED.format(source=source)


def _opened(
    source: Path,
    wanted: Selection,
    opened: tuple[str, str | None, str | None],
    sample: tuple[str, int | None],
    session: CommandSession,
) -> ClaimedArtifacts:
    """What a node opens of the roots in ``source``: its URL, a key, and the round if it is said."""
    url, api_key, round_id = opened
    roots = read_committed(source, wanted, round_id)
    with NodeClient(url, api_key, timeout_s=PATIENCE_S) as node:
        return open_sample(roots, node, sample[0], sample[1] or SAMPLE, session.line)


def _tests(
    named: Sequence[str],
    trusts_engine: bool,
    figures: tuple[float | None, Path | None, float | None],
    plan: bool,
) -> tuple[ChosenTests, CalibrationFile | GivenThreshold | None]:
    """The tests that run, and what is known of honest nodes: a plan needs to know nothing."""
    threshold, calibration, _ = figures
    has_figures = threshold is not None or calibration is not None
    tests = chosen_tests(named, has_engine=trusts_engine, has_figures=has_figures)
    is_needed = tests.judges and (has_figures or not plan)
    return tests, threshold_of(tests.others, *figures) if is_needed else None


def _engines(judged: Collection[str | None], *given: Any) -> "EngineOptions":
    # It imports torch, which other nodes in the place of weights do not need.
    from proofserve.cli.recompute import EngineOptions  # noqa: PLC0415

    engines = EngineOptions(*given)
    if engines.url is not None and engines.url in judged:
        raise ReportedError("--recompute-url: a node is no judge of itself; name another one")
    return engines


def _order_of(
    claimed: ClaimedArtifacts, given: WorkOptions, measured: CalibrationFile | None, is_file: bool
) -> Work:
    """A file may have vectors of any length; a node is asked for those of the scheme."""
    order = order_of(claimed, given if measured is None else measured.completed(given, claimed))
    if is_file and given.k_dim is None:
        require_width(claimed, order)
    return order


# What a bundle cannot hold.
_NOT_BUNDLED = (
    *("open_url", "recompute_url", "engine", "plan"),
    # Only the validator knows whether the node was asked for this.
    *("lane", "stronger_rng"),
)


def _require_bundled(bundle: Path | None, source: str | None, given: Mapping[str, Any]) -> None:
    """Raises ReportedError if a verdict rests on more than a node's own answers and weights."""
    if bundle is None:
        return
    if used := next((name for name in _NOT_BUNDLED if given.get(name)), None):
        option = used.removesuffix("_url").replace("_", "-")
        text = "it holds a node's own answers, and a verdict by --model or by nodes that sign"
        raise ReportedError(f"--bundle: {text}, without --{option}")
    if given.get("model") and given.get("reference"):
        raise ReportedError(
            "--bundle: it holds a verdict by --model or by --reference, not by both"
        )
    if not _is_url(source or ""):
        raise ReportedError("--bundle: SOURCE must be a node's URL: what a file says is not signed")


def _end_with_plan(
    engines: "EngineOptions",
    claimed: ClaimedArtifacts,
    work: Workload,
    judging: tuple[JudgingOptions, int | None],
    session: CommandSession,
) -> NoReturn:
    options, most = judging
    with session.interrupts.allowed():
        engines.plan(claimed, work, options, most, session)
    raise typer.Exit


def _imagined(
    nonces: int, seq_len: int | None, calibration: Path | None, block_height: int | None
) -> ClaimedArtifacts:
    """What a plan is about without a source: as many nonces of the usual length."""
    usual = SEQ_LEN if seq_len is None and calibration is None else None
    return ClaimedArtifacts(
        "", "", tuple(range(nonces)), (), seq_len=usual, block_height=block_height or 0
    )


@contextmanager
def _unproved(session: CommandSession, json: Path | None) -> Iterator[None]:
    """Ends the command with that word, and why, if the prover owes what it does not show."""
    try:
        yield
    except UnprovedError as error:
        verdict = SequentialResult.UNPROVED
        show(session, verdict, [f"{error.kind}: {error}"])
        if json is not None:
            write_json(json, {"verdict": verdict, "reason": error.kind, "text": str(error)})
        raise typer.Exit(EXIT_CODES[verdict]) from error


def _is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _read(
    source: str, api_key: str | None, wanted: Selection, heard: Transcript
) -> ClaimedArtifacts:
    if not _is_url(source):
        return read_file(Path(source), wanted)
    with NodeClient(source, api_key, transcript=heard) as node:
        return from_node(node, wanted)


def show(session: CommandSession, verdict: SequentialResult, lines: Iterable[str]) -> None:
    session.console.print(f"[bold {COLOURS[verdict]}]{verdict}[/]")
    for line in lines:
        session.tell(line)
