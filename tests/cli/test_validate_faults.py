"""``proofserve validate`` where something is wrong: its file, its nodes, its judges."""

import re
import socket
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.cli.validator import validate as validate_module
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.records import Work
from proofserve.rounds.records import ProofBatch, Workload
from proofserve.settings.validation import NodesFile
from proofserve.verifier.nodes import judging as by_nodes
from proofserve.verifier.validation import judging
from proofserve.verifier.validation.ledger import Ledger
from support.committed import fake_node
from support.fake_engine import FakeEngine


class OtherKernel(FakeEngine):
    """As another card would: all numbers a little beside the toy's."""

    def _compute(self, work: Workload, nonces: Sequence[int]) -> ProofBatch:
        made = super()._compute(work, nonces)
        noise = np.random.default_rng(nonces[0] % 2**32).normal(0.0, 1e-3, made.values.shape)
        return ProofBatch(made.nonces, (made.values + noise).astype(np.float32), made.failed)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A node, and two trusted ones, of which the first has its bits."""
    engines = {"node": ENGINE, "same": FakeEngine(), "other": OtherKernel()}
    with (
        fake_node(tmp_path_factory.mktemp("a"), engines["node"]) as node,
        fake_node(tmp_path_factory.mktemp("b"), engines["same"]) as same,
        fake_node(tmp_path_factory.mktemp("c"), engines["other"]) as other,
    ):
        yield {"node": node.url, "same": same.url, "other": other.url}


ENGINE = FakeEngine()


def file_of(folder: Path, url: str, references: Sequence[str], *lines: str, **about: str) -> Path:
    nodes = {"node": url} | about
    text = [
        '[validate]\nnonces = 24\ndeadline = "60s"',
        f'[models.toy]\nreferences = {[*references]!r}\nscheme = "artifact-v1"\nseq_len = 8',
        *(f'[nodes.{name}]\nurl = "{place}"\nmodel = "toy"' for name, place in nodes.items()),
        *lines,
    ]
    file = folder / "nodes.toml"
    file.write_text("\n".join(text))
    return file


def validate(file: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["validate", str(file), *options])


def said(result: Result) -> str:
    return re.sub(r"\s+", " ", result.output)


def test_an_answer_waits_for_its_judge(urls: dict[str, str], tmp_path: Path) -> None:
    """One reference is away, and there again in the next call, which does not ask once more."""
    ENGINE.calls.clear()
    first = validate(file_of(tmp_path, urls["node"], [urls["same"], "http://127.0.0.1:1"]))
    assert first.exit_code == 3, first.output
    assert "node (toy): not judged: the reference" in said(first)
    assert "its answer is kept, and the next run judges it" in said(first)
    second = validate(file_of(tmp_path, urls["node"], [urls["same"], urls["other"]]))
    assert second.exit_code == 0, second.output
    assert "node (toy): honest: " in said(second)
    assert len(ENGINE.calls) == 1


def test_an_answer_with_another_signature_is_unproved(urls: dict[str, str], tmp_path: Path) -> None:
    references = [urls["same"], urls["other"]]
    file = file_of(tmp_path, urls["node"], references, f'public_key = "{"00" * 32}"')
    result = validate(file)
    assert result.exit_code == 2, result.output
    assert "node (toy): unproved (another key): public_key: 0000" in said(result)


NEVER_ENDS = b"HTTP/1.1 200 OK\r\nX-Long: "
NO_GZIP = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\nAAAAAAAAA"


@contextmanager
def dripping(first: bytes) -> Iterator[str]:
    """A server that sends ``first``, and then a byte each 50 ms, for ever."""
    ended = threading.Event()

    def drip(client: socket.socket) -> None:
        with client:
            client.sendall(first)
            while not ended.wait(0.05):
                try:
                    client.sendall(b"x")
                except OSError:
                    return

    def serve() -> None:
        while not ended.is_set():
            try:
                client, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=drip, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        ended.set()
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(("sends", "kind"), [(NEVER_ENDS, "late"), (NO_GZIP, "not reached")])
def test_a_hostile_node_holds_up_no_other(
    sends: bytes, kind: str, urls: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "DESCRIBES_ITSELF_S", 1.0)
    with dripping(sends) as url:
        file = file_of(tmp_path, urls["node"], [urls["same"], urls["other"]], slow=url)
        result = validate(file)
    assert result.exit_code == 2, result.output
    assert "node (toy): honest: " in said(result)
    assert f"slow (toy): unproved ({kind}): GET" in said(result)


@pytest.mark.parametrize("where", ["ask", "judged_by_nodes"])
def test_an_error_that_nobody_foresaw_is_that_of_one_node(
    where: str, urls: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = judging if where == "ask" else by_nodes
    usual = getattr(module, where)

    def faulty(of: Any, *about: Any) -> Any:
        if getattr(of, "name", None) == "slow" or where != "ask":
            raise ZeroDivisionError
        return usual(of, *about)

    monkeypatch.setattr(module, where, faulty)
    file = file_of(tmp_path, urls["node"], [urls["same"], urls["other"]], slow="http://127.0.0.1:1")
    result = validate(file)
    if where == "ask":
        assert result.exit_code == 2, result.output
        assert "slow (toy): unproved (unreadable): http://127.0.0.1:1: ZeroDivisionError()" in said(
            result
        )
        assert "node (toy): honest: " in said(result)
    else:
        assert result.exit_code == 3, result.output
        assert "node (toy): not judged: ZeroDivisionError(); its answer is kept" in said(result)
        assert "slow (toy): unproved (not reached)" in said(result)


@pytest.mark.parametrize("ago", [1.0, 1000.0])
def test_what_was_asked_is_asked_again_soon_or_never(
    ago: float, urls: dict[str, str], tmp_path: Path
) -> None:
    """A validator was killed before the answer came, some seconds or a quarter of an hour ago."""
    ENGINE.calls.clear()
    file = file_of(tmp_path, urls["node"], [urls["same"], urls["other"]])
    shape = Work("", seq_len=8, scheme="artifact-v1")
    with Ledger.opened(tmp_path / "ledger.sqlite", lambda: time.time() - ago) as ledger:
        ledger.begin("toy", shape, 24, {"node": urls["node"]}, (1e-4, 86_400.0))
        (before,) = ledger.open_challenges()
    result = validate(file)
    if ago > 600:
        assert result.exit_code == 2, result.output
        assert "unproved (interrupted): the validator was ended before" in said(result)
        assert ENGINE.calls == []
    else:
        assert result.exit_code == 0, result.output
        assert ENGINE.calls == [before.challenge.nonces]


def test_a_node_that_is_in_the_file_no_more_ends_its_challenge(
    urls: dict[str, str], tmp_path: Path
) -> None:
    shape = Work("", seq_len=8, scheme="artifact-v1")
    with Ledger.opened(tmp_path / "ledger.sqlite") as ledger:
        ledger.begin("toy", shape, 24, {"old": urls["node"]}, (1e-4, 86_400.0))
    result = validate(file_of(tmp_path, urls["node"], [urls["same"], urls["other"]]))
    assert result.exit_code == 2, result.output
    assert "old (toy): unproved (interrupted): nodes.toml has no such node" in said(result)
    assert "node (toy): honest: " in said(result)


def test_a_node_whose_alpha_is_spent_is_not_asked(urls: dict[str, str], tmp_path: Path) -> None:
    ENGINE.calls.clear()
    file = file_of(tmp_path, urls["node"], [urls["same"], urls["other"]])
    file.write_text(file.read_text().replace("nonces = 24", "nonces = 24\nalpha = 1e-6"))
    shape = Work("", seq_len=8, scheme="artifact-v1")
    with Ledger.opened(tmp_path / "ledger.sqlite", lambda: time.time() - 2 * 86_400.0) as ledger:
        ledger.begin("toy", shape, 24, {"node": urls["node"]}, (1e-2, 86_400.0))
        (one,) = ledger.open_challenges()
        ledger.answered(one.number, "answers", 1.0)
        ledger.judged(one.number, SequentialResult.HONEST, "", {})
        ledger.tell()
    result = validate(file)
    assert result.exit_code == 3, result.output
    assert "2.72e-05 of 1e-06 are spent this year: it could not be convicted" in said(result)
    assert ENGINE.calls == []


def test_the_file_that_help_shows_is_one() -> None:
    text = str(validate_module.validate.__doc__).replace("\\[", "[")
    lines = text[text.index("[validate]") : text.index("proofserve validate")]
    read = NodesFile.model_validate(tomllib.loads(lines.replace("\b", "").replace('"..."', KEY)))
    assert (read.validate_.every, read.nodes["berlin-1"].model) == (86_400.0, "qwen")


KEY = f'"{"00" * 32}"'
MODEL = '[models.m]\nreferences = ["http://a", "http://b"]\n'
NODE = '[nodes.n]\nurl = "http://n"\nmodel = "m"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (MODEL, "nodes: Field required"),
        (MODEL + NODE + 'key = "secret-key"', "nodes.n: Value error, a key does not belong into"),
        (MODEL + NODE + 'key_env = "UNSET"', "nodes.n.key_env: the variable UNSET is not set"),
        (MODEL + NODE + 'key_file = "key"', "nodes.n.key_file: "),
        (MODEL + NODE.replace('"m"', '"o"'), "nodes.n.model: there is no [models.o]"),
        (MODEL + NODE.replace("http://n", "n:80"), "nodes.n.url: Value error, 'n:80' is no URL"),
        (MODEL + NODE + NODE.replace("s.n]", "s.o]"), "nodes.o.url: nodes.n has the same"),
        (MODEL + NODE.replace("//n", "//a"), "nodes.n.url: it is a reference of its model"),
        (MODEL + NODE.replace("s.n]", 's."../n"]'), "nodes.../n"),
        (MODEL + NODE + 'public_key = "00"', "nodes.n.public_key: String should match"),
        ("[models.m]\n" + NODE, "models.m: Value error, give checkpoint = FOLDER, or references"),
        ('[models.m]\ncheckpoint = "m"\n' + NODE, "models.m.checkpoint:"),
        (MODEL + 'calibration = "c"\n' + NODE, "calibration: it is about a checkpoint"),
        (MODEL + 'scheme = "s"\n' + NODE, "models.m.scheme: choose from sketch-v1,"),
        ("[validate]\nevery = 6\n" + MODEL + NODE, "validate.every: Value error, 6 is no time"),
        ("[validate]\nalpha = 2\n" + MODEL + NODE, "validate.alpha: Input should be less than 1"),
        ("[validate]\nlegder = 'l'\n" + MODEL + NODE, "validate.legder: Extra inputs"),
        ('[validate]\npage = "no/p.html"\n' + MODEL + NODE, "no is not there"),
        ("[validate\n", "is not TOML"),
    ],
)
def test_what_is_wrong_with_the_file_is_named(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text(text)
    for options in ((), ("--check-config",)):
        result = validate(file, *options)
        assert result.exit_code == 3, result.output
        assert problem in said(result)
        assert "secret-key" not in result.output
    assert [*tmp_path.iterdir()] == [file]
