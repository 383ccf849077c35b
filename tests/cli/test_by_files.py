"""``verify --reference`` on vectors that real GPUs published."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli.main import app
from real_gpus.deployments import FOLDER

H100, B200, A100 = (f"05-minimax-m27-fp8-{each}" for each in ("4xh100", "2xb200", "4xa100"))
HONEST, SAME = "04-minimax-m27-fp8-2xb200", "05-minimax-m27-fp8-2xh200"
AWQ, OTHER_AWQ = "04-minimax-m27-awq4bit-2xb200", "04-minimax-m27-awq4bit-2xh100"
LANE = ("--lane", "0:1")


def path(name: str) -> str:
    return str(FOLDER / f"{name}.json")


def beside(*names: str) -> tuple[str, ...]:
    return tuple(text for name in names for text in ("--reference", path(name)))


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", *arguments])


SEVERAL = beside(H100, B200, A100)


def test_an_honest_deployment_is_cleared_without_weights() -> None:
    result = verify(path(HONEST), *SEVERAL, *LANE, "--suspect-node", f"awq={path(AWQ)}")
    assert result.exit_code == 0, result.output
    assert "nearest to" in result.output
    assert "all ruled out on 30% of the nonces" in result.output
    assert "forges 50% of its nonces or more, if it is then twice as far away" in result.output


@pytest.mark.parametrize("suspect", [(), ("--suspect-node", f"awq={path(OTHER_AWQ)}")])
def test_one_of_four_bits_is_convicted(suspect: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    # Either test may be the first to convict, by the sample that is drawn: here it is this one.
    drawn = ("--seed", "01" * 32)
    result = verify(path(AWQ), *SEVERAL, *suspect, *LANE, *drawn, "--json", str(file))
    assert result.exit_code == 1, result.output
    report = json.loads(file.read_text())
    assert report["verdict"] == "fraud"
    assert report["nonces_used"] <= 64
    tests = {each["test"]: each for each in report["findings"]}
    if suspect:
        assert tests["suspects"]["result"] == "fraud"
        assert "errors lean to awq" in tests["suspects"]["text"]
    else:
        assert tests["nearness"]["figures"]["times_as_far"] > 1.4


def test_without_the_lane_artifacts_of_32_bits_are_not_cleared() -> None:
    result = verify(path(HONEST), *SEVERAL)
    assert result.exit_code == 2, result.output
    assert "artifact-v1 is cleared only where the lane is known" in result.output


def test_equal_bits_with_a_reference_clear(tmp_path: Path) -> None:
    result = verify(_copy(H100, tmp_path), *SEVERAL, *LANE)
    assert result.exit_code == 0, result.output
    assert "equal bits in 20 of 20 nonces" in result.output
    assert "bits are equal to those of 05-minimax-m27-fp8-4xh100.json" in result.output


def test_another_release_is_neither_convicted_nor_cleared() -> None:
    k26 = beside(*(f"05-kimi-k26-int4-2x8xh100-{each}" for each in ("tp16-b16", "tp16-b32")))
    third = beside("05-kimi-k26-4xb200-b200-k5-kimi-1")
    result = verify(path("04-kimi-k25-int4-4xb200"), *k26, *third, *LANE, "--nonces", "300")
    assert result.exit_code == 2, result.output
    assert "an honest node may be 1.75 times as far" in result.output


def test_two_references_clear_nothing_and_convict_by_a_suspect_alone() -> None:
    two = beside(H100, B200)
    result = verify(path(HONEST), *two, *LANE)
    assert result.exit_code == 2, result.output
    assert "distances decide nothing beside two references: give 3" in result.output
    suspects = ("--suspect-node", f"awq={path(OTHER_AWQ)}")
    assert verify(path(AWQ), *two, *suspects, *LANE).exit_code == 1


def test_a_reference_that_cheats_is_named_and_clears_nothing() -> None:
    result = verify(path(HONEST), *beside(H100, B200, AWQ), *LANE)
    assert result.exit_code == 2, result.output
    assert f"{AWQ}.json (2 x B200) is odd among the references" in result.output
    # What is near to it, too.
    assert verify(path(OTHER_AWQ), *beside(H100, B200, AWQ), *LANE).exit_code == 2


def test_beside_one_kind_of_card_nothing_convicts() -> None:
    b200 = beside("04-minimax-m27-fp8-2xb200", "04-minimax-m27-fp8-2xb200-triton", B200)
    suspects = ("--suspect-node", f"awq={path(AWQ)}")
    result = verify(path(OTHER_AWQ), *b200, *suspects, *LANE)
    assert result.exit_code == 2, result.output
    said = result.output.replace("\n", " ")
    for each in ("distance", "direction"):
        assert f"no {each} convicts, as the references name no two kinds of card" in said


# -- what is wrong is named, and is no fraud -------------------------------------------------------


def _copy(name: str, folder: Path, **changes: Any) -> str:
    """The file, with other fields; None leaves one out."""
    body = json.loads((FOLDER / f"{name}.json").read_text()) | changes
    file = folder / f"changed-{name}.json"
    file.write_text(json.dumps({key: value for key, value in body.items() if value is not None}))
    return str(file)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_hash": "another"}, "block_hash: expected is artifact_collection_block_v1"),
        ({"public_key": "another"}, "public_key: expected is artifact_collection_pk_v1"),
        ({"scheme": "sketch-v1"}, "scheme sketch-v1|--scheme artifact-v1 contradicts the source"),
        ({"seq_len": 256}, "--seq-len 1024 contradicts the source, which says 256"),
        ({"k_dim": 24}, "--k-dim 12 contradicts the source, which says 24"),
        ({"artifacts": []}, "0 nonces are common"),
    ],
)
def test_a_reference_about_other_work_is_named(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = _copy(SAME, tmp_path, **changes)
    result = verify(path(HONEST), *beside(H100, B200), "--reference", file, *LANE)
    assert result.exit_code == 3, result.output
    assert any(each in result.output.replace("\n", " ") for each in said.split("|")), result.output


def test_a_vector_that_is_none_is_named(tmp_path: Path) -> None:
    rows = json.loads((FOLDER / f"{SAME}.json").read_text())["artifacts"]
    # 0x7e00 is not a number in float16.
    rows[3] = {"nonce": 3, "vector_b64": "AH4" + rows[3]["vector_b64"][3:]}
    file = _copy(SAME, tmp_path, artifacts=rows)
    result = verify(path(HONEST), *beside(H100, B200), "--reference", file, *LANE)
    assert result.exit_code == 3, result.output
    assert f"changed-{SAME}.json: nonce 3" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (beside(H100), "give two nodes or files at least"),
        (beside(H100, H100), "is given twice, and is one witness"),
        (beside(H100, HONEST), "is the node that is judged"),
        ((*SEVERAL, "--test", "direction"), "--test does not go with --reference: give --model"),
        ((*SEVERAL, "--model", ".", "--plan"), "--plan does not go with --reference: leave one"),
        ((*SEVERAL, "--model", ".", "--suspect-node", "a=b"), "give the checkpoint as --suspect"),
        ((*SEVERAL, "--suspect-node", "awq.json"), "give NAME=URL or NAME=FILE"),
        (("--suspect-node", f"a={path(AWQ)}"), "give two nodes or files at least"),
        ((*SEVERAL, "--reference", "/nowhere.json"), "cannot read /nowhere.json"),
        ((*SEVERAL, "--reference", "http://127.0.0.1:9"), "the reference http://127.0.0.1:9, not"),
    ],
)
def test_options_that_cannot_be_are_named(arguments: tuple[str, ...], said: str) -> None:
    result = verify(path(HONEST), *arguments, *LANE)
    assert result.exit_code == 3, result.output
    assert said in result.output.replace("\n", " ")


def test_one_deployment_under_two_names_is_one_witness(tmp_path: Path) -> None:
    again = _copy(H100, tmp_path)
    result = verify(path(HONEST), *beside(H100, B200), "--reference", again, *LANE)
    assert result.exit_code == 3, result.output
    assert "equal bits in 64 of 64 nonces" in result.output.replace("\n", " ")


def test_references_that_often_have_equal_bits_are_one_witness(tmp_path: Path) -> None:
    """Beside three such, hardly apart, an honest node of another card would be far."""
    rows = json.loads((FOLDER / f"{H100}.json").read_text())["artifacts"]
    other = json.loads((FOLDER / f"{SAME}.json").read_text())["artifacts"]
    mixed = [one if i % 3 else two for i, (one, two) in enumerate(zip(rows, other, strict=True))]
    again = _copy(H100, tmp_path, artifacts=mixed)
    result = verify(path(HONEST), *beside(H100, B200), "--reference", again, *LANE)
    assert result.exit_code == 3, result.output
    assert "they are one witness" in result.output.replace("\n", " ")


def test_a_reference_that_does_not_say_its_card_counts_as_no_other_kind(tmp_path: Path) -> None:
    silent = _copy(A100, tmp_path, ran_on=None)
    result = verify(path(AWQ), *beside(H100, SAME), "--reference", silent, *LANE)
    assert result.exit_code == 2, result.output
    assert "the references name no two kinds of card" in result.output.replace("\n", " ")


def test_a_verdict_by_files_needs_neither_torch_nor_much_memory() -> None:
    code = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "from typer.testing import CliRunner\n"
        "from proofserve.cli.main import app\n"
        f"result = CliRunner().invoke(app, {['verify', path(HONEST), *SEVERAL, *LANE]!r})\n"
        "loaded = {'torch', 'transformers', 'vllm', 'matplotlib'} & set(sys.modules)\n"
        "said = Path('/proc/self/status').read_text()\n"
        "most = int(re.search(r'VmHWM:\\s+(\\d+) kB', said)[1]) // 1024\n"
        "print(result.exit_code, sorted(loaded), most)\n"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "tools")},
    )
    exit_code, rest = ran.stdout.split(" ", 1)
    assert (exit_code, rest.rpartition(" ")[0]) == ("0", "[]")
    assert int(rest.rpartition(" ")[2]) < 300
