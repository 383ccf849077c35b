"""Each role's path by copy and paste: the commands of its page, in an empty folder of its own.

They run in their order with the package's trained model and one real server, which the operator's
page starts. Only this is replaced:

* ports by free ones, and the hosts ``node``, ``mine`` and ``provider`` by this machine;
* the small model, which the operator makes, by a copy for the others;
* 256 tokens per nonce, the default of every command, by ``TOKENS``.

``ADDED`` has the options that are added, and why. Everything that is not run is in ``SKIPPED``.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from proofserve.cli.servers import SMALL_MACHINE
from proofserve.wiring.launch import free_port, stop
from support.node import DTYPE, IN_ONE_PROCESS
from support.readme import PageCommand, commands_of

ROOT = Path(__file__).parents[2]
ROLES = ("operator", "integrator", "validator", "customer")


def page(role: str) -> str:
    return (ROOT / "docs" / f"{role}.md").read_text()


PAGES = {role: list(commands_of(page(role))) for role in ROLES}
README = list(commands_of((ROOT / "README.md").read_text()))
# A quarter of the time of each of a thousand forwards.
TOKENS = 64
# By the beginning of the command.
SKIPPED = {
    "pip install": "the tests have the package and what it needs",
    "proofserve verify http://node:8000 --reference": "test_by_nodes.py has several nodes",
    "proofserve verify http://node:8000 --model ./model --reference": "as above",
    "proofserve verify http://node:8000 --recompute-url": (
        "both hosts are one server here, and none may judge itself; test_exact.py runs it"
    ),
    "proofserve verify http://node:8000 --model ./model --engine vllm": (
        "it starts a second server; test_exact.py runs it"
    ),
    "proofserve verify http://node:8000 --model ./model --dist-threshold": (
        "test_verify.py runs it, and time is dear"
    ),
    "proofserve challenge http://node:8000 --model ./model --every": "it goes on until Ctrl-C",
    "proofserve serve ./model --enable-poc --receipts --check-config": "the next one checks it too",
    "proofserve calibrate chat": "it chats for minutes",
    "proofserve watch-chat": "as a challenge; test_watch_chat.py runs it",
}
README_ONLY = ("make ", "pip install", "proofserve gateway")
# By the beginning of the command: what it would take minutes without.
ADDED = {
    # vLLM would compile the model, start a second process that imports everything again, and
    # multiply in bfloat16 also where that takes ten times as long.
    "proofserve serve": ("--enforce-eager", "--dtype", DTYPE, *IN_ONE_PROCESS),
    # Its check would take half a minute.
    "proofserve calibrate noise": (
        *("--nonces", "32", "--emulated", "16", "--bank", "16"),
        *("--verifications", "100", "--seq-len", str(TOKENS)),
    ),
    "proofserve check smoke": ("--seq-len", str(TOKENS)),
    # An answer with an error is a failure.
    "curl": ("--fail-with-body", "--silent", "--show-error"),
}
# These go on beside the others.
IN_BACKGROUND = ("proofserve serve", "proofserve receive")
# Verdicts of a server that is what it says.
VERDICTS = (
    *("proofserve verify http", "proofserve verify received", "proofserve challenge"),
    *("proofserve probe", "proofserve verify-chat"),
)
# Nonces of a round before the next command: enough for a verdict.
ENOUGH = 256
# Only a hang takes so long: other tests share the machine. Seconds.
COMMAND_S = START_S = ROUND_S = 900.0


def program(role: str) -> str:
    """The program of the role's page, which its reader saves under the name in its first line."""
    (found,) = re.findall(r"^```python\n(.*?)^```", page(role), re.DOTALL | re.MULTILINE)
    return str(found)


def skipped(command: PageCommand) -> str | None:
    """The key of ``SKIPPED`` that says why a command is not run; None for one that is."""
    return next((key for key in SKIPPED if command.text.startswith(key)), None)


def bare(command: PageCommand) -> str:
    return re.split(r"\s+#\s", command.text)[0]


def test_every_command_is_run_or_skipped_for_a_reason() -> None:
    every = [command for of_role in PAGES.values() for command in of_role]
    assert {skipped(each) for each in every} - {None} == set(SKIPPED)
    for each in every:
        words = {"proofserve", "curl", "openssl", "chmod", "python"}
        assert each.is_assignment or skipped(each) or each.words[0] in words, each.text


def test_the_commands_of_the_readme_are_those_of_the_roles() -> None:
    known = {bare(command) for of_role in PAGES.values() for command in of_role}
    for each in README:
        assert bare(each) in known or each.text.startswith(README_ONLY), each.text


@dataclass(slots=True)
class Reader:
    """Somebody who copies one command after the other into a shell of ``folder``."""

    folder: Path
    sockets: str
    node_port: int
    model: Path | None = None
    receiver_port: int = field(default_factory=free_port)
    done: list[str] = field(default_factory=list)
    _assigned: list[str] = field(default_factory=list)
    _running: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def run_all(self, commands: Sequence[PageCommand]) -> None:
        for command in commands:
            if skipped(command) is None:
                self.run(command)

    def run(self, command: PageCommand) -> None:
        """Raises AssertionError if the command fails, or does not find a node honest."""
        text = self.replaced(command.text)
        if command.is_assignment:
            self._assigned.append(text)
            return
        began = time.monotonic()
        if self.model is not None and text.startswith("proofserve model new"):
            shutil.copytree(self.model, self.folder / "model")
            return
        output = self._start(text) if text.startswith(IN_BACKGROUND) else self._finish(text)
        self.done.append(f"{time.monotonic() - began:6.1f} s  {text.splitlines()[0]}")
        if command.text.startswith(VERDICTS):
            # Lines of progress come before it, and the time of a challenge.
            assert re.search(r"^([-\d]+ [:\d]+ +)?honest", output, re.MULTILINE), output
        self._follow(text)

    def replaced(self, text: str) -> str:
        text = re.sub(r"http://(node|mine|provider):", "http://localhost:", text)
        text = re.sub(r'("seq_len": |--seq-len )256\b', rf"\g<1>{TOKENS}", text)
        text = re.sub(r"(?<=[: ])8000\b", str(self.node_port), text)
        text = re.sub(r"(?<=[: ])9000\b", str(self.receiver_port), text)
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
        assert ended.returncode == 0, f"exit code {ended.returncode}\n{story}"
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
        elif "$P/stop" in text:
            self._until(self._is_delivered, ROUND_S, text)

    def _status(self) -> Any:
        key = (self.folder / "operator.key").read_text().strip()
        url = f"http://127.0.0.1:{self.node_port}/api/v1/pow/status"
        answer = httpx.get(url, timeout=60.0, headers={"Authorization": f"Bearer {key}"})
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
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {text}"
            time.sleep(0.2)

    def _shell(self, text: str) -> list[str]:
        return ["bash", "-c", "\n".join((*self._assigned, text))]

    def _environment(self) -> dict[str, str]:
        ours = {name: text for name, text in SMALL_MACHINE.items() if name not in os.environ}
        # The folder of a test is too long for vLLM's sockets.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        return {**os.environ, **ours, "PATH": path, "TMPDIR": self.sockets}


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2.0).is_success
    except httpx.TransportError:
        return False


@contextmanager
def reader(folder: Path, node_port: int, model: Path | None = None) -> Iterator[Reader]:
    with TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as sockets:
        made = Reader(folder, sockets, node_port, model)
        try:
            yield made
        finally:
            made.end()
            print("\n".join(made.done))


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """An operator at the goal: the node of all other roles."""
    with reader(tmp_path_factory.mktemp("operator"), free_port()) as made:
        made.run_all(PAGES["operator"])
        yield made


@pytest.fixture(scope="module")
def integrator(operator: Reader, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """An integrator at the goal: a round that the node published, and its verdict."""
    folder = tmp_path_factory.mktemp("integrator")
    shutil.copy(operator.folder / "operator.key", folder)
    with reader(folder, operator.node_port, operator.folder / "model") as made:
        made.run_all([each for each in PAGES["integrator"] if each.section == GOAL])
        yield made


GOAL = PAGES["integrator"][0].section


@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_an_operator_serves_a_node_that_proves(operator: Reader) -> None:
    assert operator.done


@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_a_validator_reaches_verdicts(integrator: Reader, tmp_path: Path, operator: Reader) -> None:
    """Of the round that the integrator began, the node's last one so far."""
    shutil.copy(operator.folder / "validator.key", tmp_path)
    with reader(tmp_path, operator.node_port, operator.folder / "model") as made:
        made.run_all(PAGES["validator"])
    assert (tmp_path / "verdict.json").exists()


@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_a_customer_gets_an_answer(operator: Reader, tmp_path: Path) -> None:
    (tmp_path / "provider.key").write_text("a-key-that-this-provider-does-not-ask-for\n")
    with reader(tmp_path, operator.node_port, operator.folder / "model") as made:
        (tmp_path / "ask.py").write_text(made.replaced(program("customer")))
        made.run_all(PAGES["customer"])


@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_an_integrator_has_rounds_jobs_roots_and_distances(integrator: Reader) -> None:
    integrator.run_all([each for each in PAGES["integrator"] if each.section != GOAL])
