"""``proofserve watch-chat`` beside a provider over real HTTP; its receipts are of no model."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.cli.model import SmallModel, checkpoint
from proofserve.verifier.chat import conversation as collecting
from proofserve.verifier.chat.conversation import write
from support.provider import WEIGHTS, Node, provider

FRAUD, UNDECIDED, NO_VERDICT = 1, 2, 3


@pytest.fixture(scope="module")
def model() -> Path:
    return checkpoint(SmallModel("trained"))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "POLL_S", 0.01)


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["watch-chat", *map(str, args)])


def watched(model: Path, url: str, tmp_path: Path, *args: object) -> tuple[Result, dict[str, Any]]:
    """A watch, and its report."""
    out = tmp_path / "report.json"
    result = run(url, "--model", model, "--every", 0.1, "--out", out, *args)
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []
    assert out.exists(), result.output
    return result, json.loads(out.read_text())


def test_help_teaches() -> None:
    result = run("--help")
    text = " ".join(result.output.split())
    assert result.exit_code == 0
    assert "proofserve watch-chat http://gateway:7000 --model ./model" in text
    assert "exit code 1 at the first verdict of fraud" in text


def test_it_asks_chats_of_its_own_until_the_log_forks(model: Path, tmp_path: Path) -> None:
    with provider(forks_after=4) as (served, url):
        result, report = watched(model, url, tmp_path, "--log", url, "--api-key", "secret,other")
    assert result.exit_code == FRAUD, result.output
    asked = [body["messages"][0]["content"] for body in served.bodies]
    assert len(asked) == len(set(asked)) == report["chats"] == 4
    assert {body["temperature"] for body in served.bodies} == {0.0, 1.0}
    assert all(body["return_token_ids"] and body["top_p"] == 1.0 for body in served.bodies)
    assert set(served.keys) == {"Bearer secret"}
    assert report["times_cleared"] == 0
    assert "it forks: the node showed another entry" in report["last"]["failures"][0]["text"]
    # Its receipts are of another checkpoint, and say so.
    assert f"weights_digest: the receipt has {WEIGHTS}" in result.output


def test_no_two_watches_ask_the_same_unless_the_seed_is_given(model: Path, tmp_path: Path) -> None:
    """A provider that knew the prompts would answer only these honestly."""
    asked = []
    for seed in ((), (), ("--seed", "same"), ("--seed", "same")):
        with provider(forks_after=2) as (served, url):
            _, report = watched(model, url, tmp_path, "--log", url, *seed)
        asked.append([body["messages"][0]["content"] for body in served.bodies])
        assert report["last"]["seed"] == "same" or not seed
    assert not set(asked[0]) & set(asked[1])
    assert asked[2] == asked[3]


def test_missing_receipts_are_counted(model: Path, tmp_path: Path) -> None:
    with provider(gone=503) as (_, url):
        result, report = watched(model, url, tmp_path, "--for", 0.3)
    assert result.exit_code == UNDECIDED
    assert report["gaps"]["missing"] == report["answers"] == report["chats"] >= 1
    assert "missing, of 1 answers: 100%" in result.output


def test_a_provider_that_fails_for_a_while_does_not_end_it(model: Path, tmp_path: Path) -> None:
    with provider(failing=[503, 500], forks_after=4) as (served, url):
        result, report = watched(model, url, tmp_path, "--log", url)
    assert result.exit_code == FRAUD, result.output
    assert len(served.bodies) == 4
    assert (report["chats"], report["unreadable"]) == (2, 2)
    assert "503" in result.output


def test_a_log_that_cannot_be_read_for_a_while_does_not_end_it(model: Path, tmp_path: Path) -> None:
    with provider(broken_logs=2, forks_after=4) as (_, url):
        result, report = watched(model, url, tmp_path, "--log", url)
    assert result.exit_code == FRAUD, result.output
    assert (report["chats"], report["unreadable"]) == (4, 0)
    assert result.output.count("entries is no list") == 2


def test_a_provider_that_is_not_there_is_no_verdict(model: Path) -> None:
    with provider() as (_, url):
        pass
    result = run(url, "--model", model, "--for", 1)
    assert result.exit_code == NO_VERDICT
    assert f"GET {url}/v1/models" in result.output


def fill(folder: Path, count: int) -> None:
    folder.mkdir()
    node = Node()
    for number in range(count):
        write(folder / f"chat-{number}.json", node.chat(f"chat {number}"))


def test_kept_chats_are_checked_and_nothing_is_sent(model: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats"
    fill(chats, 3)
    (chats / "broken.json").write_text("{")
    (chats / ".half.part").write_text("{")
    with provider() as (served, url):
        result, report = watched(model, url, tmp_path, "--chats", chats, "--for", 0.3)
    assert result.exit_code == UNDECIDED, result.output
    assert (report["chats"], report["answers"], report["unreadable"]) == (3, 3, 1)
    assert "broken.json" in result.output
    assert served.bodies == []


def test_a_watch_goes_on_with_what_it_kept(model: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats"
    fill(chats, 3)
    kept = ("--chats", chats, "--for", 0.3, "--evidence", tmp_path / "evidence")
    first = watched(model, "http://unused", tmp_path, *kept)[1]
    write(chats / "one more.json", Node().chat("one more"))
    again = watched(model, "http://unused", tmp_path, *kept)[1]
    assert (first["chats"], first["gaps"]) == (3, {"other weights": 3})
    assert (again["chats"], again["gaps"]) == (4, {"other weights": 4})
    other = run("http://unused", "--model", model, *kept, "--alpha", 0.1)
    assert other.exit_code == NO_VERDICT
    assert "alpha: the file has 1e-06, this watch 0.1" in " ".join(other.output.split())


def test_a_share_of_kept_chats_is_checked(model: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats"
    fill(chats, 40)
    folder = ("--chats", chats, "--for", 0.3)
    _, report = watched(model, "http://unused", tmp_path, *folder, "--share", 0.5, "--seed", "0")
    assert 10 < report["chats"] < 30
    result = run("http://unused", "--model", model, *folder, "--share", 0.0)
    assert result.exit_code == UNDECIDED, result.output
    assert "0 chats; the next check is in 10 s" in result.output


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["http://x"], "Missing option '--model'"),
        (["http://x", "--model", "m", "--share", "2"], "'--share'"),
        (["http://x", "--model", "m", "--every", "0"], "'--every'"),
        (["http://x", "--model", "m", "--for", "-1"], "'--for'"),
        (["http://x", "--model", "gone-model"], "gone-model"),
        (["http://x", "--model", "m", "--calibration", "gone.json"], "cannot read gone.json"),
        (["http://x", "--model", "m", "--alpha", "0"], "alpha"),
        (["http://x", "--model", "MODEL", "--chats", "gone"], "--chats: gone is no folder"),
        (["http://a:port", "--model", "MODEL"], "http://a:port: Invalid port"),
    ],
)
def test_a_usage_error_is_no_verdict(model: Path, args: list[str], named: str) -> None:
    result = run(*(model if arg == "MODEL" else arg for arg in args))
    assert result.exit_code == NO_VERDICT, result.output
    assert named in " ".join(result.output.split())
    assert "Traceback" not in result.output
