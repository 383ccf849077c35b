"""Chats with real servers: answers of the published model, and answers that another one wrote.

A provider that cheats has a cheap server write, and the real one read: that one chooses the tokens
that it is told (``Scripted``), by an entry point of vLLM that no receipt shows.
"""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file

from measuring.files import ROOT
from measuring.jobs import Job, proofserve
from proofserve.cli.servers import ServerOptions, scratch_folder, serving
from proofserve.cli.session import CommandSession
from proofserve.remote.recorder import Recorder
from proofserve.reports import write_json
from proofserve.verifier.chat.conversation import CHAT, ReceiptClient, request, write
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
SKIPPED: Final = "without its middle layer"
WRITERS: Final = (SKIPPED, "int4 g128", "fp8 per channel", "int8 per channel")
# Makes the outputs of a layer nothing, so that it gives what it got.
_OUTPUTS: Final = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_ENTRY_POINT: Final = "[vllm.logits_processors]\nscripted = soundness.scripted:Scripted\n"


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
