"""``proofserve demo``: shows what the product does, in about a minute, on any machine."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Column, Table

from proofserve.cli import recompute
from proofserve.cli.model import SmallModel, checkpoint, trained_calibration
from proofserve.cli.servers import DemoDtype, ServerOptions, served_in, serving
from proofserve.cli.session import EXIT_FAILED, CommandSession, open_session
from proofserve.cli.validator.verify import COLOURS
from proofserve.lab.chats import Call, Reply, ask_all, chat, chats
from proofserve.lab.host import quick_dtype
from proofserve.lab.node_client import NodeClient
from proofserve.lab.records import Work, tampered, vectors_of
from proofserve.lab.report import LabError
from proofserve.models.trained import DENSE
from proofserve.protocol.nonces import fresh_seed
from proofserve.protocol.receipts.record import SCHEME as RECEIPT_SCHEME
from proofserve.protocol.sketch import SketchScheme
from proofserve.protocol.verdict.comparison import Claim
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.verifier.calibration_file import checkpoint_shape, read
from proofserve.verifier.chat.conversation import Conversation, ReceiptClient, requests
from proofserve.verifier.chat.statements import NodeFacts
from proofserve.verifier.chat.verification import ChatChecker
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judges import OWN, BankRun, Chances
from proofserve.verifier.judging import DIRECTION, JudgingOptions, judged
from proofserve.verifier.verification import Verification

# Nonces that the validator recomputes in a forward.
FORWARD_BATCH = 8
CHATS = 8
CHAT_TOKENS = 16
QUESTION = "What is a nonce?"
ANSWER_TOKENS = 80
NONCES = 64
SHOWN = 3
SHOWN_VALUES = 10
# Every second one: a validator who is sure of a node after few nonces has met some of them.
TAMPER_EVERY = 2
# A cheating node is judged after fewer.
CHEATED_NONCES = 32
MODEL = SmallModel(DENSE.name)
SCHEME = SketchScheme(seeded_experts=True)
# Values per nonce: those of two twins.
WIDTH = SCHEME.width
WORK = Work(
    MODEL.name,
    block_hash="demo-block",
    public_key="demo-key",
    k_dim=SCHEME.k_dim,
    scheme=SCHEME.name,
)
WORKLOAD = recompute.workload_of(WORK)
OTHER_MODEL = SmallModel("qwen3", "tiny", seed=1)
# Rows of the table, and the weights that a cheating node serves.
QUANTISED = (("4-bit weights", "int4 g128"), ("fp8 weights", "fp8 per channel"))
# Answers with receipts, tokens of each, and the seed of their prompts.
ANSWERS, RECEIPT_TOKENS, SEED = 4, 48, 1
# An honest node of a machine that is not here.
OTHER_KERNEL = "vLLM on a GPU"
HONEST, FRAUD = SequentialResult.HONEST, SequentialResult.FRAUD


app = typer.Typer()


@app.command()
def demo(dtype: DemoDtype = None) -> None:
    """Serve a small model, chat, prove, and tell honest proofs and receipts from forged.

    Needs no network, no GPU and no settings, and leaves no process running.
    """
    served = dtype or quick_dtype()
    with open_session() as session:
        session.line.step("writing two small models, unless they are in the cache")
        mine, other = checkpoint(MODEL), checkpoint(OTHER_MODEL)
        deployment = ServerOptions(mine, MODEL.name, receipts=True, dtype=served)
        with serving(deployment, session) as node:
            version = node.versions().get("vllm", "")
            what = f"{MODEL.name}, a model of 3.5M parameters,"
            session.say("Server", f"vLLM {version}, unmodified, serves {what} at {node.url}")
            session.say("", served_in(served))
            call = chat(MODEL.name, QUESTION, ANSWER_TOKENS, ignore_eos=False)
            (reply,) = _replies(node, "asking a question", [call], session)
            session.say("Chat", f"{QUESTION} - {' '.join(reply.texts[0].split())}")
            claims = _proofs(node, session)
            with ReceiptClient(node.url) as client:
                asked = requests(MODEL.name, SEED, ANSWERS, RECEIPT_TOKENS)
                answers = client.chats(asked, ANSWERS, session.line)
            if any(len(each.receipts) < len(each.choices) for each in answers):
                raise LabError("an answer has no receipt")
            session.say("Receipts", f"the server signed one for each of {ANSWERS} more answers")
            session.line.step("stopping the server")
        session.console.print("[bold]Stopped[/bold]   no process of the demo is running")
        with session.interrupts.allowed():
            session.line.step("loading the model as a validator, without a server")
            judged = DemoValidator(mine, other, session).judge(claims)
            receipts_hold = _receipts_are_judged_right(mine, answers, session)
    if not (judged and receipts_hold):
        raise typer.Exit(EXIT_FAILED)


def _proofs(node: NodeClient, session: CommandSession) -> list[Claim]:
    """Chat without proofs and beside them, then prove; what the first nonces gave."""

    def chat_eight(text: str) -> list[Reply]:
        calls = chats(MODEL.name, range(CHATS), CHAT_TOKENS, salt=text)
        return _replies(node, text, calls, session)

    def await_proved(nonces: int) -> None:
        session.wait_while_moving(
            "proofs",
            lambda: node.status().processed >= nonces,
            lambda: f"{node.status().processed} of {nonces} nonces",
        )

    after = node.last_seq()
    alone = chat_eight("chatting without proofs")
    session.say("Chat", f"without proofs: {_latency(alone)} a chat")
    with node.round(WORK):
        session.line.step("starting a round")
        await_proved(1)
        beside = chat_eight("chatting while a round runs")
        session.line.step("proving")
        await_proved(NONCES)
        status = node.status()
    same = sum(a.texts == b.texts for a, b in zip(alone, beside, strict=True))
    session.say("Chat", f"with proofs:    {_latency(beside)} a chat, {same} of {CHATS} identical")
    session.say("Proofs", f"{status.rate:.0f} nonces/s while chat was idle; the first sketches:")
    rows = node.results(after, NONCES)
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
        raise LabError(f"a chat failed: {errors[0]}")
    return replies


class DemoValidator:
    """Judges as ``proofserve verify`` with the calibration of the trained model, in float32."""

    def __init__(self, mine: Path, other: Path, session: CommandSession) -> None:
        self._session = session
        self._other = other.name
        with trained_calibration() as file:
            measured = read(file)
        self._options = JudgingOptions(threshold=measured)
        self._validator = honest = recompute.proof_validator(
            recompute.validator_setup(mine), WORKLOAD, FORWARD_BATCH
        )
        self._truth = honest.as_truth(WIDTH, FORWARD_BATCH)
        shape, digest = checkpoint_shape(mine), honest.weights_digest
        measured.require(WORKLOAD, [MODEL.name], shape, digest, honest.is_dense)
        # The other model is in the bank of the forging node alone: nothing suspects it by name.
        forging = recompute.validator_setup(mine, suspects=[other])
        self._forger = recompute.proof_validator(forging, WORKLOAD, FORWARD_BATCH)

    def judge(self, claims: Sequence[Claim]) -> bool:
        """Print a verdict for the server's claims and for forged ones; whether all are right."""
        nonces = [claim.nonce for claim in claims[:CHEATED_NONCES]]
        count = f"a copy with {len(claims[::TAMPER_EVERY])} of {len(claims)} altered"
        self._session.line.step(f"emulating {OTHER_KERNEL}")
        run = BankRun(kernels=OTHER_KERNEL)
        by_kernel = recompute.claims_of_vectors(self._validator.vectors(run, nonces))
        trials = [
            ("what this server produced", claims, HONEST),
            (f"an honest node: {OTHER_KERNEL}", by_kernel, HONEST),
            (count, tampered(claims, WIDTH, TAMPER_EVERY), FRAUD),
            ("another model's artifacts", self._served_by(self._other, nonces), FRAUD),
            *((what, self._served_by(name, nonces), FRAUD) for what, name in QUANTISED),
        ]
        self._session.console.print("[bold]Verdicts[/bold]  by a validator in float32:")
        table = Table("", "verdict", Column("nonces", justify="right"), "test", box=None)
        right = []
        for what, made, expected in trials:
            numbers = tuple(claim.nonce for claim in made)
            claimed = ClaimedArtifacts(WORK.block_hash, WORK.public_key, numbers, tuple(made))
            line = self._session.line
            found = judged(claimed, self._truth, self._options, fresh_seed(), None, line)
            outcome = found.outcome
            table.add_row(*_row(what, expected, outcome))
            right.append(outcome.verdict is expected)
        self._session.console.print(table)
        return all(right)

    def _served_by(self, name: str, nonces: Sequence[int]) -> list[Claim]:
        """What a node answers that serves the weights ``name`` and claims the published ones."""
        self._session.line.step(f"computing the same nonces with {name}")
        return recompute.claims_of_vectors(self._forger.vectors(replace(OWN, weights=name), nonces))


def _latency(replies: Sequence[Reply]) -> str:
    return f"{statistics.median(reply.seconds for reply in replies) * 1e3:4.0f} ms"


def _row(what: str, expected: SequentialResult, outcome: Verification) -> tuple[str, str, str, str]:
    verdict = outcome.verdict
    said = f"[{COLOURS[verdict]}]{verdict}[/]"
    surprise = "" if verdict is expected else "  [red](should not be)[/red]"
    # The tests that agree on the verdict; of several that convict, the one that names weights.
    deciding = [found for found in outcome.opinions if found.result is verdict]
    reason = ", ".join(found.test for found in deciding)
    if verdict is FRAUD:
        found = max(deciding, key=lambda each: each.test == DIRECTION)
        reason = f"{found.test}: {found.text}"
    return f"          {what}", said + surprise, str(outcome.nonces_used), escape(reason)


def _receipts_are_judged_right(
    model: Path, chats: Sequence[Conversation], session: CommandSession
) -> bool:
    """Print what the receipts say of the answers, and of an answer with another token."""
    with trained_calibration(RECEIPT_SCHEME) as file:
        checker = ChatChecker(recompute.validator_setup(model), read(file), fresh_seed())
    known, chances = NodeFacts(checker.weights_digest), Chances()
    honest = checker.outcome(chats, known, chances, session.line)
    choice = chats[0].choices[0]
    ids = choice.token_ids or ()
    other = replace(choice, token_ids=(ids[-1], *ids[1:-1], ids[0]))
    altered = replace(chats[0], choices=(other,))
    forged = checker.outcome([altered], known, chances, session.line)
    passed = [each.test for each in honest.opinions if each.result is HONEST]
    tests = ", ".join(("signature", "log", "prompt", "answer", "sampling", *passed))
    session.say("Receipts", f"{ANSWERS} answers: {honest.verdict} ({tests})")
    said = ", ".join(f"{each.check}: {each.text}" for each in forged.failures)
    session.say("", f"one with another token: {forged.verdict} ({said})")
    return (honest.verdict, forged.verdict) == (HONEST, FRAUD)
