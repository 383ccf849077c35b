"""What answers of real servers show: who read them, and who wrote them, in many orders.

Some are answers of the published model, others were written by another one. A provider that cheats
has a cheap server write, and the real one read: that one chooses the tokens that it is told
(``Scripted``), by an entry point of vLLM that no receipt shows.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Final

import numpy as np
from safetensors.torch import load_file, save_file

from measuring.files import ROOT
from measuring.jobs import Job, proofserve
from measuring.results import table_rows
from proofserve.cli.servers import ServerOptions, scratch_folder, serving
from proofserve.cli.session import CommandSession
from proofserve.engines.reference.suspects import SKIPPED
from proofserve.remote.recorder import Recorder
from proofserve.reports import Progress, write_json
from proofserve.verifier.chat.answers import Answer, Blocks
from proofserve.verifier.chat.conversation import CHAT, ReceiptClient, read, request, write
from proofserve.verifier.chat.statements import NodeFacts
from proofserve.verifier.chat.verification import ChatChecker
from proofserve.verifier.chat.writers import WRITERS, Writers, writers_of, written
from proofserve.verifier.judges import Chances
from proofserve.verifier.validator import ValidatorSetup
from proofserve.verifier.verification import Truth, verify
from proofserve.verifier.written.readings import ReadAnswer, Readings, SuspectReading
from proofserve.wiring.launch import free_port, running_server
from proofserve_lab.checkpoints import write_rounded_copy
from soundness.subjects import FOLDER, Subject

TOKENS: Final = 64
AT_ONCE: Final = 8
# Honest answers: every second one is greedy, every third one a stream, and seven in ten come
# through a gateway.
HONEST: Final = 200
# Of each writer, of which every second one is greedy.
CHEAP: Final = 80
# Makes the outputs of a layer nothing, so that it gives what it got.
_OUTPUTS: Final = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_ENTRY_POINT: Final = "[vllm.logits_processors]\nscripted = soundness.scripted:Scripted\n"

# Orders in which the tokens of honest answers are judged, their sketches (of which a verdict takes
# half a second), and the answers of each writer.
ORDERS, ORDERS_OF_SKETCHES, ORDERS_OF_CHEATS = 10_000, 1000, 1000
# Answers of which the sketches are judged in all orders: nodes are cleared by a few.
READ_BY: Final = 48
# The two questions have half of alpha each.
CHANCES: Final = Chances(Chances().alpha / 2)
SEED: Final = "soundness"

Item = tuple[ReadAnswer, dict[str, SuspectReading]]

HEAD: Final = ("writer", "sampled answers: median, 99 %", "greedy", "nats a sampled answer")


def folder_of(arch: str, kind: str) -> Path:
    """Where the chats of ``kind`` lie: "honest" or a writer."""
    return FOLDER / "answers" / arch / kind.replace(" ", "-")


def jobs(arch: str) -> list[Job]:
    """What was not asked yet, in an order in which it can be asked."""
    made = []
    if not any(folder_of(arch, "honest").glob("*.json")):
        made.append(_job(f"{arch} honest", "ask", arch, "honest"))
    for name in WRITERS:
        if not _script(arch, name).is_file():
            made.append(_job(f"{arch} {name}", "ask", arch, name))
    if not all(any(folder_of(arch, name).glob("chat-*.json")) for name in WRITERS):
        liar = FOLDER / "scripted"
        path = os.pathsep.join(map(str, (liar, ROOT / "tools", ROOT / "src")))
        made.append(_job(f"{arch} read", "read", arch, PYTHONPATH=path))
    return made


def _job(name: str, *arguments: str, **variables: str) -> Job:
    return Job(name, ("-m", "soundness", *arguments), variables, cores=2)


def ask_honest(subject: Subject, session: CommandSession) -> None:
    """Keep the chats of an application with an honest server. Raises ServerFailed."""
    model, folder = subject.model, folder_of(subject.arch, "honest")
    shutil.rmtree(folder, ignore_errors=True)
    options = ServerOptions(model.folder, model.name, receipts=True)
    with scratch_folder() as scratch, serving(options, session) as node:
        gateway = proofserve("gateway", VLLM_BACKEND_URL=node.url)
        with (
            running_server(gateway, free_port(), scratch / "gateway.log") as front,
            Recorder(folder) as recorder,
            recorder.http_client() as client,
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):
            session.line.step(f"{HONEST} answers", HONEST)

            def ask(number: int) -> None:
                body = request(model.name, number, TOKENS, greedy=number % 2 == 1)
                url = front.url if number % 10 < 7 else node.url
                asked = {**body, "stream": number % 3 == 0}
                client.post(f"{url}{CHAT}", json=asked).raise_for_status()
                session.line.advance()

            list(pool.map(ask, range(HONEST)))


def ask_writer(subject: Subject, name: str, session: CommandSession) -> None:
    """Keep the requests and the tokens of a server with cheaper weights. Raises ServerFailed."""
    model = subject.model
    with scratch_folder() as scratch:
        cheap = scratch / "cheap"
        if name == SKIPPED:
            _without_a_layer(model.folder, cheap)
        else:
            write_rounded_copy(model.folder, cheap, name)
        wanted = [request(model.name, HONEST + n, TOKENS, greedy=n % 2 == 1) for n in range(CHEAP)]
        with (
            serving(ServerOptions(cheap, model.name), session) as node,
            ReceiptClient(node.url) as client,
        ):
            chats = client.chats(wanted, AT_ONCE, session.line)
    scripts = [
        {"request": asked, "tokens": chat.choices[0].token_ids}
        for asked, chat in zip(wanted, chats, strict=True)
    ]
    file = _script(subject.arch, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, scripts)


def read_answers(subject: Subject, session: CommandSession) -> None:
    """Have the published model make the receipts of what the writers wrote."""
    model = subject.model
    options = ServerOptions(model.folder, model.name, receipts=True)
    with serving(options, session) as node, ReceiptClient(node.url) as client:
        for name in WRITERS:
            scripts = json.loads(_script(subject.arch, name).read_text())
            told = [
                {**each["request"], "vllm_xargs": {"script": each["tokens"]}} for each in scripts
            ]
            for number, chat in enumerate(client.chats(told, AT_ONCE, session.line)):
                # What the customer sent, and got.
                asked = {n: v for n, v in chat.request.items() if n != "vllm_xargs"}
                file = folder_of(subject.arch, name) / f"chat-{number}.json"
                write(file, replace(chat, request=asked))


def prepare_liar() -> None:
    """Make the entry point that ``read_answers`` needs when vLLM starts."""
    folder = FOLDER / "scripted" / "scripted-1.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(_ENTRY_POINT)


def _without_a_layer(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    layers = int(json.loads((source / "config.json").read_text())["num_hidden_layers"])
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for name, values in tensors.items():
            if name.endswith(tuple(f".layers.{layers // 2}.{each}" for each in _OUTPUTS)):
                values.zero_()
        save_file(tensors, file, {"format": "pt"})


def _script(arch: str, name: str) -> Path:
    return folder_of(arch, name) / "written.json"


class AnswersTrial:
    """One published model, its validator, and the chats in its folders."""

    def __init__(self, subject: Subject, progress: Progress) -> None:
        self._arch = subject.arch
        self._progress = progress
        self._checker = ChatChecker(ValidatorSetup(subject.model.folder), None, SEED)
        validator = self._checker.validator
        self._readings = Readings(validator, writers_of(validator.names))

    def _answers(self, kind: str) -> tuple[tuple[Answer, ...], list[str], list[str]]:
        """The answers of a folder, what fails in them, and what is missing."""
        files = sorted(folder_of(self._arch, kind).glob("*.json"))
        chats = [read(file) for file in files if file.name != "written.json"]
        known = NodeFacts(self._checker.weights_digest)
        found = self._checker.checked(chats, known)
        gaps = [f"{each.kind}: {each.text}" for each in found.gaps]
        return found.answers, [f"{each.check}: {each.text}" for each in found.failures], gaps

    def honest(self) -> str:
        """For docs/receipts.md: how many orders named a cheap writer, and what they ended as."""
        answers, failures, gaps = self._answers("honest")
        items = self._items(answers, f"{self._arch}: honest answers")
        orders = self._progress.over("who wrote them, in many orders", range(ORDERS))
        convicted = sum(self._judged(_shuffled(items, each)) is not None for each in orders)
        writers = Writers(self._readings, CHANCES, 0)
        for item in items:
            writers.restore(*item)
        first = (
            f"{self._arch}: {len(items)} honest answers, {len(failures)} failures,"
            f" {len(gaps)} gaps; written by: {convicted} of {ORDERS} orders convicted;"
            f" read by: {self._read_by(answers[:READ_BY])}"
        )
        return "\n".join([first, *failures[:3], *gaps[:3], *writers.finding().lines()])

    def of_writer(self, name: str) -> str:
        """A row below ``HEAD``, and what fails in the receipts."""
        answers, failures, _ = self._answers(name)
        items = self._items(answers, f"{self._arch}: {name}")
        ends = []
        for kind, is_greedy in {"sampled": False, "greedy": True}.items():
            of = [item for item in items if item[0].is_greedy == is_greedy]
            orders = self._progress.over(f"{name}, {kind}, in many orders", range(ORDERS_OF_CHEATS))
            ends.append(_ends([self._judged(_shuffled(of, each)) for each in orders]))
        gain = mean(by[name].log_ratio for one, by in items if not one.is_greedy)
        row = table_rows([(name, *ends, f"{gain:.4f}")])
        return "\n".join([row, *(f"{name}: {text}" for text in failures[:2])])

    def _items(self, answers: Sequence[Answer], title: str) -> list[Item]:
        """The answers as the published weights and those of the bank read them."""
        self._progress.step(title)
        writers = Writers(self._readings, CHANCES, 0)
        reads = writers.add([written(each, SEED) for each in answers]) + writers.compare()
        return [(each, writers.by_writers(each)) for each in reads]

    def _judged(self, items: Sequence[Item]) -> int | None:
        """After how many answers they convict; None if all of them do not."""
        writers = Writers(self._readings, CHANCES, 0)
        for number, item in enumerate(items, 1):
            writers.restore(*item)
            if writers.convicts:
                return number
        return None

    def _read_by(self, answers: Sequence[Answer]) -> dict[str, int]:
        """What the sketches say, by the answers in many orders, as ``readers`` judges them."""
        blocks = Blocks(answers, SEED)
        validator = self._checker.validator.with_other(blocks.forwards)
        ours = Truth(validator.truth, blocks.width, len(blocks), validator=validator)
        claimed, first = blocks.claims(), blocks.conversations()
        ended, quiet = Counter[str](), Progress()
        orders = range(ORDERS_OF_SKETCHES)
        for number in self._progress.over("who read them, in many orders", orders):
            place = np.random.default_rng(number).permutation(len(answers))
            order = sorted(claimed.nonces, key=lambda block: (place[first[block]], block))
            judges = self._checker.sketch_judges(blocks, ours, CHANCES)
            ended[str(verify(claimed, order, ours, judges, quiet).verdict)] += 1
        return dict(ended)


def _shuffled(items: Sequence[Item], number: int) -> list[Item]:
    return [items[place] for place in np.random.default_rng(number).permutation(len(items))]


def _ends(after: Sequence[int | None]) -> str:
    ended = sorted(each for each in after if each is not None)
    share = len(ended) / len(after)
    if not ended:
        return "not convicted"
    last = str(ended[int(0.99 * len(after)) - 1]) if share >= 0.99 else "-"
    soon = sum(each <= 5 for each in ended) / len(after)
    return f"{median(ended):.0f}, {last} ({share:.1%} convicted, {soon:.0%} within 5)"
