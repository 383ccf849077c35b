"""``proofserve demo``: shows what the product does, in under a minute, on any machine."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import typer
from rich.markup import escape
from rich.table import Column, Table

from proofserve.cli.model import SmallModel, checkpoint
from proofserve.cli.recompute import claims_of_model
from proofserve.cli.servers import ServerOptions, serving
from proofserve.cli.session import EXIT_FAILED, CommandSession, open_session
from proofserve.lab.client.chats import chats
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.load import Reply, ask_all
from proofserve.lab.client.node_client import NodeClient, computing_round, wait_until
from proofserve.lab.client.records import Work
from proofserve.lab.client.vectors import claims_of, tampered, vectors_of
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.records import Artifact, StatTest, Verdict

# Small, so that the round hardly delays the chat beside it.
FORWARD_BATCH = 8
CHATS = 8
CHAT_TOKENS = 16
NONCES = 64
SHOWN = 3
TAMPER_EVERY = 8
ROUND_S = 60.0
MODEL = SmallModel("qwen3", "tiny", seed=0)
OTHER_MODEL = SmallModel("qwen3", "tiny", seed=1)


@dataclass(frozen=True, slots=True)
class DemoResult:
    what: str
    claims: Sequence[Claim]
    fraud: bool


app = typer.Typer()


@app.command()
def demo() -> None:
    """Serve a small model, chat, prove, and distinguish honest proofs from forged ones.

    Needs no network, no GPU and no settings, and leaves no process running.
    """
    with open_session() as session:
        session.line.step("writing two small models, unless they are in the cache")
        mine, other = checkpoint(MODEL), checkpoint(OTHER_MODEL)
        deployment = ServerOptions(mine, MODEL.name, FORWARD_BATCH)
        with serving(deployment, session) as node:
            steps = _Demo(node, session)
            steps.introduce()
            claims = steps.prove()
            session.line.step("computing the same nonces with another model, without a server")
            foreign = claims_of_model(other, steps.work, [claim.nonce for claim in claims])
            altered = tampered(claims, steps.work.k_dim, TAMPER_EVERY)
            as_expected = steps.judge(
                DemoResult("what this server produced", claims, fraud=False),
                DemoResult(f"a copy with {NONCES // TAMPER_EVERY} altered", altered, fraud=True),
                DemoResult("another model's artifacts", foreign, fraud=True),
            )
            session.line.step("stopping the server")
        session.console.print("[bold]Stopped[/bold]   no process of the demo is running")
    if not as_expected:
        raise typer.Exit(EXIT_FAILED)


class _Demo:
    def __init__(self, node: NodeClient, session: CommandSession) -> None:
        self.work = Work(MODEL.name, block_hash="demo-block", public_key="demo-key")
        self._node = node
        self._console = session.console
        self._line = session.line

    def introduce(self) -> None:
        version = self._node.versions().get("vllm", "")
        self._say("Server", f"vLLM {version}, unmodified, serves {MODEL.name} at {self._node.url}")

    def prove(self) -> list[Claim]:
        after = self._node.last_seq()
        alone = self._chat("chatting without proofs")
        self._say("Chat", f"without proofs: {_latency(alone)} a chat")
        with computing_round(self._node, self.work):
            beside = self._chat("chatting while a round runs")
            self._line.step("proving")
            wait_until(lambda: self._node.status().processed >= NONCES, "proofs", ROUND_S)
            status = self._node.status()
        same = sum(a.texts == b.texts for a, b in zip(alone, beside, strict=True))
        self._say("Chat", f"with proofs:    {_latency(beside)} a chat, {same} of {CHATS} identical")
        self._say("Proofs", f"{status.rate:.0f} nonces/s while chat was idle; the first vectors:")
        rows = self._node.results(after, NONCES)
        claims = claims_of([Artifact(r.nonce, r.value) for r in rows if r.value is not None])
        self._show(claims[:SHOWN])
        return claims

    def judge(self, *trials: DemoResult) -> bool:
        self._line.step("judging")
        threshold = f"the network's threshold of {StatTest().dist_threshold}"
        self._say("Verdicts", f"the server recomputes {NONCES} nonces and compares by {threshold}:")
        table = Table("", Column("differ", justify="right"), "p-value", "verdict", box=None)
        right = True
        for trial in trials:
            verdict = self._node.validate(self.work, trial.claims)
            right = right and verdict.fraud_detected is trial.fraud
            table.add_row(*_row(trial, verdict))
        self._console.print(table)
        return right

    def _chat(self, text: str) -> list[Reply]:
        self._line.step(text, CHATS)
        calls = chats(self.work.model, range(CHATS), CHAT_TOKENS, salt=text)
        replies = ask_all(self._node.url, calls, 1, self._line.advance)
        if errors := [reply.error for reply in replies if reply.error]:
            raise LabError(f"a chat failed: {errors[0]}")
        return replies

    def _say(self, label: str, text: str) -> None:
        text = f"[bold]{label:9}[/bold] {escape(text)}"
        self._console.print(text, highlight=False, soft_wrap=True)

    def _show(self, claims: Sequence[Claim]) -> None:
        for nonce, vector in vectors_of(claims, self.work.k_dim).items():
            numbers = " ".join(f"{value:+.2f}" for value in vector)
            text = f"          nonce {nonce}: {numbers}"
            self._console.print(text, highlight=False, soft_wrap=True)


def _latency(replies: Sequence[Reply]) -> str:
    return f"{statistics.median(reply.seconds for reply in replies) * 1e3:4.0f} ms"


def _row(trial: DemoResult, verdict: Verdict) -> tuple[str, str, str, str]:
    said = "[red]fraud[/red]" if verdict.fraud_detected else "[green]honest[/green]"
    surprise = "" if verdict.fraud_detected is trial.fraud else "  [red](should not be)[/red]"
    counts = f"{verdict.n_mismatch} of {verdict.n_total}"
    return f"          {trial.what}", counts, f"{verdict.p_value:.2g}", said + surprise
