"""``bench verify`` by the trained model of the package and its own calibration."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve_lab.checkpoints import trained_calibration
from support.four_bits import one_thread


def run(*args: str | Path) -> Result:
    with one_thread(), trained_calibration() as calibration:
        command = ["bench", "verify", "trained", "--calibration", calibration, *args]
        return CliRunner().invoke(app, [*map(str, command)])


@pytest.mark.usefixtures("few_kernels")
def test_an_honest_node_is_timed_until_it_is_cleared(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = run("--nonces", "60", "--kernel", "vLLM on a GPU", "--json", file)
    assert result.exit_code == 0, result.output
    read = json.loads(file.read_text())
    assert read["setup"]["kernel"] == "vLLM on a GPU"
    # The validator knew none of the vectors before, and needs several for a verdict.
    assert 20 <= read["nonces"] <= 60
    assert read["seconds_to_honest"] > 0
    # None at all where the lengths of the errors rule every suspect out.
    assert 0 <= read["share_of_suspects"] < 1


def test_a_sample_that_is_too_small_to_clear_has_no_time() -> None:
    result = run("--nonces", "2")
    assert result.exit_code == 2
    assert "ended undecided after 2 nonces" in " ".join(result.output.split())


def test_an_unknown_kernel_is_named_with_those_that_there_are() -> None:
    result = run("--kernel", "abacus")
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "--kernel abacus: choose from" in said
    assert "vLLM on a GPU" in said
