"""``verify`` and ``challenge`` as functions: what a program gets is what the commands write."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.challenged import VALIDATOR, ChallengedNode, challenged_node
from proofserve.cli.main import app
from proofserve.client import Calibration, VerdictError, challenge, check_bundle, verify
from proofserve.reports import write_json
from real_gpus.deployments import FOLDER
from support.four_bits import one_thread
from support.small_bank import small_bank

ROOT = Path(__file__).parents[2]
EXAMPLES, MODELS = ROOT / "docs" / "api" / "examples", ROOT / "src" / "proofserve" / "models"
SHAPE = ("--scheme", "sketch-v1", "--seq-len", "32")
FEW = ("--nonces", "32", "--emulated", "32", "--bank", "24", "--verifications", "100")
JUDGED, *TRUSTED = (
    str(FOLDER / f"{each}.json")
    for each in (
        *("04-minimax-m27-awq4bit-2xb200", "05-minimax-m27-fp8-4xh100"),
        *("05-minimax-m27-fp8-2xb200", "05-minimax-m27-fp8-4xa100"),
    )
)


def test_the_import_loads_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, proofserve, proofserve.client as client\n"
        "assert 'scipy' not in sys.modules, 'a recorder needs no statistics'\n"
        "for name in client.__all__: getattr(client, name)\n"
        "assert not {'torch', 'matplotlib', 'transformers', 'vllm'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_file_is_judged_by_files_as_by_the_command(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    given = [text for each in TRUSTED for text in ("--reference", each)]
    options = ("--lane", "0:1", "--seed", "7", "--json", str(report))
    assert CliRunner().invoke(app, ["verify", JUDGED, *given, *options]).exit_code == 1
    found = verify(JUDGED, references=TRUSTED, lane=(0, 1), seed="7")
    assert found["verdict"] == "fraud"
    assert json.loads(json.dumps(found)) == json.loads(report.read_text())


@pytest.mark.parametrize(
    ("references", "said"),
    [
        ([], "give model, or two references or more"),
        (TRUSTED[:1], "give model, or two references or more"),
        ([JUDGED, *TRUSTED], "is the node that is judged"),
        (["/nowhere/a.json", "/nowhere/b.json"], "cannot read /nowhere/"),
    ],
)
def test_what_is_wrong_is_an_error_and_no_verdict(references: list[str], said: str) -> None:
    with pytest.raises(VerdictError, match=said):
        verify(JUDGED, references=references)


def test_the_bundle_of_a_real_node_holds_until_it_is_changed(tmp_path: Path) -> None:
    (bundle,) = json.loads((EXAMPLES / "bundle.json").read_text())
    write_json(tmp_path / "bundle.json", bundle)
    assert check_bundle(tmp_path / "bundle.json") == []
    write_json(tmp_path / "bundle.json", {**bundle, "public_key": "00" * 32})
    assert "is not signed by the node's key" in "\n".join(check_bundle(tmp_path / "bundle.json"))
    with pytest.raises(VerdictError, match="json: format: "):
        check_bundle(MODELS / "trained" / "calibration.json")


@pytest.fixture(scope="module")
def calibration(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calibration]:
    """Of sketches of the tiny model, by few emulated kernels, while few are emulated."""
    file = tmp_path_factory.mktemp("calibration") / "calibration.json"
    with one_thread(), small_bank():
        options = ["calibrate", "noise", str(tiny), *SHAPE, *FEW, "--out", str(file)]
        result = CliRunner().invoke(app, options)
        assert result.exit_code == 0, result.output
        yield Calibration.read(file)


@pytest.fixture(scope="module")
def node(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChallengedNode]:
    with challenged_node(tiny, tmp_path_factory.mktemp("node")) as made:
        yield made


def test_a_node_is_challenged_and_its_answer_verified(
    node: ChallengedNode, tiny: Path, calibration: Calibration, tmp_path: Path
) -> None:
    by = {"model": tiny, "calibration": calibration}
    asked = {**by, "api_key": VALIDATOR, "nonces": 32, "deadline_s": 600.0}
    assert challenge(node.url, **asked)["outcome"] == "honest"
    node.engine.serves = node.engine.four_bits
    found = challenge(node.url, **asked)
    assert found["outcome"] == "fraud"
    assert found["report"] is not None
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps(found["answer"]))
    again = verify(str(answer), **by, seed=found["report"]["seed"])
    assert again["verdict"] == "fraud"
    assert again["findings"] == json.loads(json.dumps(found["report"]["findings"]))


def test_a_node_that_owes_the_answer_is_unproved(node: ChallengedNode, tiny: Path) -> None:
    refused = challenge(node.url, model=tiny, api_key="no key of it", nonces=4)
    assert (refused["outcome"], refused["kind"]) == ("unproved", "refused")
    away = verify("http://127.0.0.1:9", model=tiny)
    assert (away["verdict"], away["reason"]) == ("unproved", "not reached")


def test_a_calibration_goes_with_its_model(calibration: Calibration, tmp_path: Path) -> None:
    with pytest.raises(VerdictError, match="it is about a checkpoint; give model"):
        verify(JUDGED, references=TRUSTED, calibration=calibration)
    with pytest.raises(VerdictError, match="cannot read"):
        verify(str(tmp_path / "none.json"), model=tmp_path, calibration=calibration)
