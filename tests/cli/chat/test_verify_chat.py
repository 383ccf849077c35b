"""``proofserve verify-chat``: exit codes, named fields, and verdicts over real files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.cli.model import SmallModel, checkpoint
from proofserve.engines.reference.kernels import PROFILES
from proofserve.engines.reference.network import load, with_kernels
from proofserve.protocol.receipts.record import token_hash
from proofserve.verifier.chat.conversation import Conversation, write
from proofserve.verifier.validator import CheckpointTokenizer
from proofserve_lab.checkpoints import trained_calibration
from support.chats import KEY, Writer
from support.provider import Node, provider

HONEST, FRAUD, UNDECIDED, NO_VERDICT = 0, 1, 2, 3


@pytest.fixture(scope="module")
def model() -> Path:
    return checkpoint(SmallModel("trained"))


@pytest.fixture(scope="module")
def written(model: Path) -> list[Conversation]:
    """Chats that an honest node answered, which reads them by a server's kernels."""
    network = load(model, "bfloat16", "cpu")
    reads = with_kernels(load(model, "float32", "cpu"), PROFILES["vLLM on x86 with bfloat16"])
    digest = network.facts.weights_digest
    assert digest is not None
    writer = Writer(network, CheckpointTokenizer(model), digest, reads=reads)
    halves = (writer.chats(range(n, 10, 2), 48, temperature=float(n)) for n in range(2))
    return [chat for pair in zip(*halves, strict=True) for chat in pair]


@pytest.fixture
def files(tmp_path: Path, written: list[Conversation]) -> list[Path]:
    paths = [tmp_path / f"{chat.name}.json" for chat in written]
    for path, chat in zip(paths, written, strict=True):
        write(path, chat)
    return paths


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["verify-chat", *map(str, args)])


def said(result: Result) -> str:
    return " ".join(result.output.split())


def changed(path: Path, where: list[Any], value: object) -> None:
    body = json.loads(path.read_text())
    inner = body
    for each in where[:-1]:
        inner = inner[each]
    inner[where[-1]] = value
    path.write_text(json.dumps(body))


def test_help_teaches() -> None:
    result = run("--help")
    text = said(result)
    assert result.exit_code == 0
    for word in ("signature", "log", "prompt", "answer", "sampling", "paired", "tokens"):
        assert f" {word} " in text
    for line in (
        '"return_token_ids": true',
        "Exit code 0: honest. 1: fraud. 2: undecided",
        "proofserve calibrate chat ./model --out chat.json",
        "proofserve verify-chat answer.json --model ./model --calibration chat.json",
    ):
        assert line in text


def test_honest_files_are_cleared(model: Path, files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out" / "verdict.json"
    out.parent.mkdir()
    with trained_calibration("receipt-v1") as calibration:
        options = ("--model", model, "--calibration", calibration, "--json", out)
        result = run(*files, *options, "--public-key", KEY.public_key.hex())
    assert result.exit_code == HONEST, result.output
    assert "10 answers with a receipt checked" in result.output
    record = json.loads(out.read_text())
    assert (record["verdict"], record["choices"], record["failures"]) == ("honest", 10, [])


def test_one_altered_file_convicts(model: Path, files: list[Path]) -> None:
    ids = json.loads(files[1].read_text())["response"]["choices"][0]["token_ids"]
    changed(files[1], ["response", "choices", 0, "token_ids"], [*ids[:-1], ids[-1] ^ 1])
    result = run(*files, "--model", model)
    assert result.exit_code == FRAUD, result.output
    assert "answer fraud: the receipt is of other tokens" in said(result)


def test_another_nodes_key_convicts(model: Path, files: list[Path]) -> None:
    result = run(files[0], "--model", model, "--public-key", "00" * 32)
    assert result.exit_code == FRAUD
    assert "by another key than the node's" in said(result)


def test_files_without_receipts_are_no_verdict_on_the_node(model: Path, files: list[Path]) -> None:
    for path in files[:2]:
        changed(path, ["receipts"], [])
    result = run(*files[:2], "--model", model)
    assert result.exit_code == UNDECIDED
    assert "2 missing, of 2 answers: 100%, more than 5%" in said(result)


def test_the_public_log_is_asked(model: Path, written: list[Conversation], tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    node = Node(key=KEY)
    receipt = written[0].receipts[0].receipt
    write(path, replace(written[0], receipts=(node.sign(receipt),)))
    with provider() as (served, url):
        served.node = Node(key=KEY)
        served.node.chat("another")
        forked = run(path, "--model", model, "--log", url)
        served.node = node
        honest = run(path, "--model", model, "--log", url)
    gone = run(path, "--model", model, "--log", url)
    assert forked.exit_code == FRAUD
    assert "log fraud: log: it forks: it has another entry 0" in said(forked)
    assert honest.exit_code != FRAUD, honest.output
    assert "1 answers with a receipt checked" in honest.output
    assert gone.exit_code == NO_VERDICT
    assert f"GET {url}/api/v1/receipts/log" in said(gone)


@pytest.mark.parametrize(
    ("where", "value", "named"),
    [
        (["request"], 5, "request: "),
        (["response", "choices", 0, "token_ids"], [-1], "response.choices.0.token_ids.0: "),
        (["response", "id"], 7, "response.id: "),
        (["receipts", 0, "receipt", "k_dim"], 8, "receipts.0: receipt.k_dim: "),
        (["receipts", 0, "signature"], "zz", "receipts.0: signature: "),
        (["extra"], 1, "extra: "),
    ],
)
def test_a_bad_file_is_no_verdict(
    files: list[Path], where: list[Any], value: object, named: str
) -> None:
    changed(files[0], where, value)
    result = run(files[0], "--model", "unread")
    assert result.exit_code == NO_VERDICT
    assert named in said(result)
    assert "chat-0.json" in said(result)
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "Missing argument"),
        (["FILE"], "Missing option '--model'"),
        (["FILE", "--model", "m", "--wrong"], "No such option"),
        (["gone.json", "--model", "m"], "cannot read gone.json"),
        (["FILE", "--model", "m", "--public-key", "xyz"], "--public-key: 'xyz' is not hexadecimal"),
        (["FILE", "--model", "m", "--public-key", "abcd"], "--public-key: 2 bytes where 32 are"),
        (["FILE", "--model", "m", "--alpha", "0"], "alpha"),
        (["FILE", "--model", "m", "--beta", "2"], "beta"),
        (["FILE", "FILE", "--model", "m"], "are of the same response chat-0"),
        (["FILE", "--model", "gone-model"], "gone-model"),
        (["FILE", "--model", "m", "--calibration", "gone.json"], "cannot read gone.json"),
    ],
)
def test_a_usage_error_is_no_verdict(files: list[Path], args: list[str], named: str) -> None:
    result = run(*(files[0] if arg == "FILE" else arg for arg in args))
    assert result.exit_code == NO_VERDICT, result.output
    assert named in said(result)
    assert "Traceback" not in result.output


@pytest.mark.parametrize("place", [5, -1])
@pytest.mark.parametrize("token", [2**32 - 1, 300_000])
def test_a_token_that_the_model_does_not_have_convicts(
    model: Path, written: list[Conversation], tmp_path: Path, place: int, token: int
) -> None:
    """A node may sign any ids; it must not end a validator by them."""
    path = tmp_path / "one.json"
    chat = written[1]
    receipt = chat.receipts[0].receipt
    ids = list(chat.choices[0].token_ids or ())
    ids[place] = token
    lie = Node(key=KEY).sign(replace(receipt, output_sha256=token_hash(ids)))
    write(path, replace(chat, receipts=(lie,)))
    changed(path, ["response", "choices", 0, "token_ids"], ids)
    result = run(path, "--model", model)
    assert result.exit_code == FRAUD, result.output
    assert f"the model has no token {token}" in said(result)
    assert "Traceback" not in result.output
