"""The reader's path by copy and paste: README's commands, then those of the page that goes on.

They run in their order against one real server, which README starts. Only this is replaced:

* the model, by the package's trained one, in the folder that the validator's commands name;
* ports by free ones, and the hosts ``node`` and ``mine`` by this machine;
* 256 tokens per nonce, the default of every command, by ``TOKENS``;
* ROUND, which the text above it explains, by the id that ``/status`` has just shown.

``ADDED`` has the options that are added, and why. Everything that is not run is in ``SKIPPED``.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from proofserve.cli.servers import SMALL_MACHINE
from proofserve.engines.checkpoints import weights_digest
from proofserve.models.trained import DENSE
from proofserve.models.writer import write_trained
from proofserve.protocol import SEQ_LEN
from proofserve.wiring.launch import free_port, stop
from support.node import DTYPE, IN_ONE_PROCESS
from support.readme import PageCommand, commands_of

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "first-round.md")
COMMANDS = [command for page in PAGES for command in commands_of(page.read_text())]
# Sections whose commands are run, and how many there are in all.
RUN = (
    "An operator",
    "A validator",
    "A customer",
    "A round, with curl",
    "Verifying another node",
    "The distance protocol",
)
COUNT = 22
# A quarter of the time of each of a thousand forwards.
TOKENS = 64
# By the beginning of the command, or the section.
SKIPPED = {
    "make demo": "test_demo.py runs it",
    "make test": "this is a part of it",
    "pip install": "the tests have the package and what it needs",
    "proofserve verify http://node:8000 --recompute-url": (
        "both hosts are one server here, and none may judge itself; test_exact.py runs it"
    ),
    "proofserve verify http://node:8000 --model ./model --engine vllm": (
        "it starts a second server; test_exact.py runs it"
    ),
    "proofserve gateway": "test_gateway.py runs it, in front of several servers",
    "proofserve challenge": "it judges as `verify` does, which runs; test_challenge.py runs it",
    "proofserve calibrate chat": "its server needs receipts, and it chats for minutes",
    "proofserve watch-chat": "its server needs receipts; test_watch_chat.py runs it",
}
# By the beginning of the command: what it would take minutes without.
ADDED = {
    # vLLM would compile the model, start a second process that imports everything again, and
    # multiply in bfloat16 also where that takes ten times as long.
    "proofserve serve": ("--enforce-eager", "--dtype", DTYPE, *IN_ONE_PROCESS),
    # Its check would take half a minute.
    "proofserve calibrate noise": (
        *("--nonces", "64", "--emulated", "32", "--bank", "64"),
        *("--verifications", "100", "--seq-len", str(TOKENS)),
    ),
    # An answer with an error is a failure.
    "curl": ("--fail-with-body", "--silent", "--show-error"),
}
# These go on beside the others.
IN_BACKGROUND = ("proofserve serve", "proofserve receive")
# Nonces of a round before the next command: enough for a verdict.
ENOUGH = 256
# Only a hang takes so long: other tests share the machine. Seconds.
COMMAND_S = START_S = ROUND_S = 900.0


def skipped(command: PageCommand) -> str | None:
    """The key of ``SKIPPED`` that says why a command is not run; None for one that is."""
    if command.section in SKIPPED:
        return command.section
    return next((key for key in SKIPPED if command.text.startswith(key)), None)


def test_every_command_is_run_or_skipped_for_a_reason() -> None:
    run = [each for each in COMMANDS if skipped(each) is None]
    assert {each.section for each in run} == set(RUN)
    assert {skipped(each) for each in COMMANDS} - {None} == set(SKIPPED)
    for each in run:
        assert each.is_assignment or each.words[0] in {"proofserve", "curl"}, each.text
    assert sum(not each.is_assignment for each in run) == COUNT
    tokens = [int(n) for each in run for n in re.findall(r'"seq_len": (\d+)', each.text)]
    # What commands take that name no number.
    assert set(tokens) == {SEQ_LEN}


@dataclass(slots=True)
class Reader:
    """Somebody who copies one command after the other into a shell of ``folder``."""

    folder: Path
    sockets: str
    node_port: int = field(default_factory=free_port)
    receiver_port: int = field(default_factory=free_port)
    done: list[str] = field(default_factory=list)
    _assigned: list[str] = field(default_factory=list)
    _running: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    _round: str | None = None

    def run(self, command: PageCommand) -> str:
        """The output. Raises AssertionError if the command fails."""
        text = self.replaced(command.text)
        if command.is_assignment:
            self._assigned.append(text)
            return ""
        began = time.monotonic()
        output = self._start(text) if text.startswith(IN_BACKGROUND) else self._finish(text)
        self.done.append(f"{time.monotonic() - began:6.1f} s  {text.splitlines()[0]}")
        self._follow(text)
        return output

    def replaced(self, text: str) -> str:
        text = text.replace("Qwen/Qwen3-0.6B", "./model")
        text = text.replace("https://provider.example", "http://localhost:8000")
        text = re.sub(r"http://(node|mine):", "http://localhost:", text)
        text = text.replace(f'"seq_len": {SEQ_LEN}', f'"seq_len": {TOKENS}')
        text = re.sub(r"(?<=[: ])8000\b", str(self.node_port), text)
        text = re.sub(r"(?<=[: ])9000\b", str(self.receiver_port), text)
        if "--round ROUND" in text:
            assert self._round is not None, "no command has shown the round's id"
            text = text.replace("--round ROUND", f"--round {self._round}")
        for name, options in ADDED.items():
            if text.startswith(name):
                # Options stand behind the command, and before its comment.
                text = " ".join((re.split(r"\s+#\s", text)[0], *options))
        return text

    def end(self) -> None:
        for process in reversed(self._running):
            stop(process)

    def _finish(self, text: str) -> str:
        ended = subprocess.run(
            self._shell(text),
            env=self._environment(),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        story = "\n".join((*self.done, text, ended.stdout, ended.stderr))
        assert ended.returncode == 0, f"exit code {ended.returncode}\n{story}\n{self._log()}"
        return ended.stdout

    def _start(self, text: str) -> str:
        port = self.receiver_port if text.startswith("proofserve receive") else self.node_port
        with (self.folder / f"{port}.log").open("wb") as log:
            process = subprocess.Popen(
                self._shell(text),
                env=self._environment(),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running.append(process)
        self._until(lambda: process.poll() is not None or answers(port), START_S, text)
        assert process.poll() is None, f"{text}\n{(self.folder / f'{port}.log').read_text()}"
        return ""

    def _follow(self, text: str) -> None:
        """Wait as a reader would: for proofs of a round, and for its callbacks after its end."""
        if "/init/generate" in text:
            self._until(lambda: self._stats().get("total_processed", 0) >= ENOUGH, ROUND_S, text)
        elif "$P/status" in text:
            self._round = self._status()["round_id"]
        elif "$P/stop" in text:
            self._until(self._is_delivered, ROUND_S, text)

    def _status(self) -> Any:
        answer = httpx.get(f"http://127.0.0.1:{self.node_port}/api/v1/pow/status", timeout=60.0)
        assert answer.is_success, answer.text
        return answer.json()

    def _stats(self) -> Any:
        return self._status()["stats"] or {}

    def _is_delivered(self) -> bool:
        """Whether the receiver has all vectors, or all roots, of the node's last round."""
        status = self._status()
        if "k_dim" not in status["config"]:
            # No later command reads what a distance round posts.
            return True
        answer = httpx.get(f"http://127.0.0.1:{self.receiver_port}/summary", timeout=60.0)
        block = status["config"]["block_hash"]
        arrived = [
            source["artifacts"] + source["committed"]
            for source in answer.json()["sources"]
            if source["block_hash"] == block
        ]
        return sum(arrived) == status["stats"]["total_found"]

    def _until(self, condition: Callable[[], bool], seconds: float, text: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {text}\n{self._log()}"
            time.sleep(0.2)

    def _shell(self, text: str) -> list[str]:
        return ["bash", "-c", "\n".join((*self._assigned, text))]

    def _environment(self) -> dict[str, str]:
        ours = {name: text for name, text in SMALL_MACHINE.items() if name not in os.environ}
        # The folder of a test is too long for vLLM's sockets.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        return {**os.environ, **ours, "PATH": path, "TMPDIR": self.sockets}

    def _log(self) -> str:
        log = self.folder / f"{self.node_port}.log"
        return "\n".join(log.read_text().splitlines()[-20:]) if log.exists() else ""


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2.0).is_success
    except httpx.TransportError:
        return False


@contextmanager
def reader(folder: Path) -> Iterator[Reader]:
    with TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as sockets:
        made = Reader(folder, sockets)
        try:
            yield made
        finally:
            made.end()


@pytest.mark.engine
@pytest.mark.timeout(3600)
def test_the_readers_path_works_by_copy_and_paste(tmp_path: Path) -> None:
    write_trained(tmp_path / "model", DENSE, weights_digest)
    with reader(tmp_path) as user:
        for command in COMMANDS:
            if skipped(command) is not None:
                continue
            output = user.run(command)
            if command.text.startswith(("proofserve verify", "proofserve probe")):
                # Lines of progress come before it.
                assert any(each.startswith("honest") for each in output.splitlines()), output
        print("\n".join(user.done))
    assert len(user.done) == COUNT
    assert json.loads((tmp_path / "calibration.json").read_text())["scheme"] == "artifact-v1"
