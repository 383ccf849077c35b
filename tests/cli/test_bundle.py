"""``--bundle`` and ``verify-bundle``: a verdict that convinces who trusts neither side."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cli.bundled import forged
from cli.challenged import VALIDATOR, ChallengedNode, challenged_node
from proofserve.cli.main import app
from proofserve.protocol.nonces import draw
from proofserve.reports import ReportedError
from proofserve.verifier import bundle as bundles
from proofserve.verifier import challenge
from support.four_bits import one_thread
from support.pace import wait_until
from support.small_bank import small_bank

EXITS = {"honest": 0, "fraud": 1}


@pytest.fixture(scope="module", autouse=True)
def few_kernels() -> Iterator[None]:
    with small_bank():
        yield


@pytest.fixture(scope="module")
def node(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChallengedNode]:
    with one_thread(), challenged_node(tiny, tmp_path_factory.mktemp("node")) as made:
        yield made


def run(*arguments: str) -> Result:
    with one_thread():
        return CliRunner().invoke(app, [*arguments])


@pytest.fixture(scope="module")
def made(
    node: ChallengedNode, of_tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A bundle of each verdict, about an honest challenge and one of a node with 4 bits."""
    folder, found = tmp_path_factory.mktemp("bundles"), {}
    asked = ("challenge", node.url, "--api-key", VALIDATOR, "--nonces", "32", "--deadline", "600")
    for verdict, code in EXITS.items():
        node.engine.serves = node.engine.honest if verdict == "honest" else node.engine.four_bits
        found[verdict] = folder / f"{verdict}.json"
        result = run(*asked, *of_tiny, "--bundle", str(found[verdict]))
        assert result.exit_code == code, result.output
    node.engine.serves = node.engine.honest
    return found


@pytest.mark.parametrize("verdict", EXITS)
def test_a_third_party_comes_to_the_same_verdict(
    verdict: str, made: dict[str, Path], of_tiny: tuple[str, ...]
) -> None:
    checked = run("verify-bundle", str(made[verdict]), "--check-only")
    assert checked.exit_code == 0, checked.output
    assert f"sample, distances and verdict agree: {verdict} after" in checked.output
    again = run("verify-bundle", str(made[verdict]), *of_tiny)
    assert again.exit_code == EXITS[verdict], again.output
    assert ("So does another sample" in again.output) is (verdict == "fraud")


def test_the_check_needs_no_torch(made: dict[str, Path]) -> None:
    code = (
        "import sys\nfrom proofserve.cli.main import app\n"
        "try: app()\nexcept SystemExit as end: assert not end.code, end\n"
        "assert 'torch' not in sys.modules"
    )
    argv = (sys.executable, "-c", code, "verify-bundle", str(made["fraud"]), "--check-only")
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def faults(file: Path) -> list[str]:
    """What is wrong with it, be it a bundle or none."""
    try:
        return [*bundles.faults_of(file)]
    except (ReportedError, UnicodeDecodeError) as error:
        return [str(error)]


@pytest.mark.parametrize("verdict", EXITS)
def test_no_changed_byte_goes_unseen(verdict: str, made: dict[str, Path], tmp_path: Path) -> None:
    raw, draw, file = made[verdict].read_bytes(), random.Random(7), tmp_path / "changed.json"
    assert faults(made[verdict]) == []
    file.write_bytes(raw.replace(b"\n", b"\r", 1))
    assert faults(file)
    for _ in range(100):
        place = draw.randrange(len(raw))
        other = draw.choice([byte for byte in range(256) if byte != raw[place]])
        file.write_bytes(raw[:place] + bytes([other]) + raw[place + 1 :])
        assert faults(file), (place, raw[place], other)


def test_a_part_of_another_form_is_named(made: dict[str, Path], tmp_path: Path) -> None:
    body, file = json.loads(made["fraud"].read_text()), tmp_path / "forged.json"
    report = dict(body["report"])
    report["nonces_usee"] = report.pop("nonces_used")
    assert "report.nonces_used" in faults(forged(made["fraud"], file, report=report))[0]
    findings = [{"test": "direction"}]
    report = body["report"] | {"findings": findings}
    assert "report.findings.0" in faults(forged(made["fraud"], file, report=report))[0]
    answers = [body["answers"][0] | {"time_ms": -1}, *body["answers"][1:]]
    assert "answers.0.time_ms" in faults(forged(made["fraud"], file, answers=answers))[0]


def test_a_validator_cannot_change_what_the_node_said(
    made: dict[str, Path], tmp_path: Path
) -> None:
    body = json.loads(made["honest"].read_text())
    body["answers"][-1]["body"] = body["answers"][-1]["body"].replace("block_hash", "block_hush")
    (fault, *_) = faults(forged(made["honest"], tmp_path / "f.json", answers=body["answers"]))
    assert fault.endswith("is not signed by the node's key")
    (fault, *_) = faults(forged(made["honest"], tmp_path / "f.json", public_key="00" * 32))
    assert fault.endswith("is not signed by the node's key")


def test_a_validator_cannot_change_its_verdict_alone(made: dict[str, Path], tmp_path: Path) -> None:
    report = json.loads(made["honest"].read_text())["report"]
    file = tmp_path / "f.json"
    found = faults(forged(made["honest"], file, report={**report, "verdict": "fraud"}))
    assert found[0].startswith("report: the verdict is fraud, its findings say honest")
    distances = {nonce: 2 * each for nonce, each in report["distances"].items()}
    found = faults(forged(made["honest"], file, report={**report, "distances": distances}))
    assert found[0].startswith("report: the distance of nonce")
    found = faults(forged(made["honest"], file, seed="another"))
    assert "ours: it has nonces that the seed did not draw" in found


def test_a_validator_that_invents_vectors_is_found_by_the_model(
    made: dict[str, Path], of_tiny: tuple[str, ...], tmp_path: Path
) -> None:
    """The check alone cannot know what the published weights would give."""
    body = json.loads(made["honest"].read_text())
    report = body["report"]
    guilty = {**report["findings"][0], "result": "fraud"}
    report |= {"verdict": "fraud", "findings": [guilty, *report["findings"][1:]]}
    file = forged(made["honest"], tmp_path / "f.json", report=report)
    assert run("verify-bundle", str(file), "--check-only").exit_code == 0
    again = run("verify-bundle", str(file), *of_tiny)
    assert again.exit_code == 3, again.output
    assert "verdict: honest, the bundle says fraud" in again.output


def test_a_validator_cannot_choose_the_nonces(
    node: ChallengedNode, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(challenge, "nonces_of", lambda _block, count: tuple(range(count)))
    file = tmp_path / "chosen.json"
    asked = ("challenge", node.url, "--api-key", VALIDATOR, "--nonces", "4", "--deadline", "600")
    assert run(*asked, "--model", str(tiny), "--bundle", str(file)).exit_code == 2
    assert faults(file) == ["answers: the validator chose the nonces: they are not of the block"]


def test_the_files_have_to_be_those_of_the_verdict(made: dict[str, Path], tiny: Path) -> None:
    result = run("verify-bundle", str(made["honest"]), "--model", str(tiny))
    assert result.exit_code == 3
    assert "--calibration: its SHA-256 is none" in result.output
    assert run("verify-bundle", str(made["honest"])).exit_code == 3


@pytest.fixture(scope="module")
def round_of_node(node: ChallengedNode) -> str:
    """The URL of an honest node with a round of 32 nonces or more."""
    order: dict[str, Any] = {"block_hash": "theirs", "block_height": 7, "public_key": "its-key"}
    order |= {"node_id": 0, "node_count": 1, "scheme": "sketch-v1", "batch_size": 8}
    order |= {"params": {"model": "tiny", "seq_len": 8, "k_dim": 64}}
    assert node.node.post("/init/generate", order).is_success
    wait_until(lambda: node.node.computed() >= 32, 600.0)
    assert node.node.post("/stop", {}).is_success
    return node.url


def test_a_round_of_a_node_is_evidence_too(round_of_node: str, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "round.json"
    asked = ("verify", round_of_node, "--model", str(tiny), "--nonces", "32")
    result = run(*asked, "--api-key", "operators-key", "--bundle", str(file))
    assert result.exit_code == 0, result.output
    assert faults(file) == []
    again = run("verify-bundle", str(file), "--model", str(tiny))
    assert again.exit_code == 0, again.output
    wanted = json.loads(file.read_text())["wanted"] | {"lane": {"node_id": 0, "node_count": 2}}
    found = faults(forged(file, tmp_path / "f.json", wanted=wanted))
    assert "answers: the validator says what the node owed, without a signature" in found


def test_a_seed_that_convicts_by_chance_does_not_convince(
    round_of_node: str, tiny: Path, tmp_path: Path
) -> None:
    """The count convicts if the first five nonces are far; of those of a round few are."""
    asked = ("verify", round_of_node, "--model", str(tiny), "--api-key", "operators-key")
    report, file = tmp_path / "report.json", tmp_path / "bundle.json"
    count = ("--test", "count", "--p-mismatch", "0.3", "--p-fraud", "0.9", "--alpha", "0.01")
    options = (*count, "--fixed", "--dist-threshold", "9", "--json", str(report))
    assert run(*asked, *options).exit_code == 0
    distances = json.loads(report.read_text())["distances"]
    threshold = sorted(distances.values())[-8]
    far = {int(nonce) for nonce, distance in distances.items() if distance >= threshold}
    seeds = map(str, range(10**6))
    seed = next(s for s in seeds if {*draw(map(int, distances), s, 5)} <= far)
    tried = (*count, "--dist-threshold", str(0.99 * threshold), "--seed", seed)
    assert run(*asked, *tried, "--bundle", str(file)).exit_code == 1
    again = run("verify-bundle", str(file), "--model", str(tiny))
    assert "which the validator chose" in again.output
    assert again.exit_code == 3, again.output
    assert "another sample of the same answers does not convict" in again.output


def test_a_node_whose_answers_are_changed_on_the_way_has_signed_nothing(
    node: ChallengedNode, of_tiny: tuple[str, ...], tmp_path: Path
) -> None:
    """It cannot end its verdict by that."""
    node.meddling.strips_signature = True
    node.engine.serves = node.engine.four_bits
    try:
        asked = ("challenge", node.url, *of_tiny, "--api-key", VALIDATOR)
        few = ("--nonces", "32", "--deadline", "600", "--bundle", str(tmp_path / "b.json"))
        result = run(*asked, *few)
    finally:
        node.meddling.strips_signature = False
        node.engine.serves = node.engine.honest
    assert result.exit_code == 1, result.output
    assert "does not sign its answers" in result.output
    assert not (tmp_path / "b.json").exists()


def test_what_a_bundle_cannot_hold_is_refused(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "claims.json"
    file.write_text("{}")
    wanted = ("--model", str(tiny), "--bundle", str(tmp_path / "b.json"))
    assert "SOURCE must be a node's URL" in run("verify", str(file), *wanted).output
    several = ("--reference", "http://a", "--reference", "http://b")
    result = run("verify", "http://node", *several, *wanted)
    assert "not by both" in result.output
    assert run("challenge", "http://node", *several, *wanted).exit_code == 3
