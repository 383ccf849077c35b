import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.engines.reference import engine
from proofserve.engines.reference.forward import NetworkForward, Passed
from support.four_bits import one_thread

FEW = ("--seq-len", "8", "--seconds", "0.1", "--dtype", "float32")


def run(*args: str | Path) -> Result:
    with one_thread():
        return CliRunner().invoke(app, ["bench", "reference", *map(str, args)])


def test_figures_of_a_real_engine(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = run(tiny, *FEW, "--batch", "2", "--batch", "4", "--json", file)
    assert result.exit_code == 0, result.output
    read = json.loads(file.read_text())
    # 6 layers of q and o (256 x 256), k and v (256 x 128), and three of 256 x 512.
    assert read["setup"]["weights"] == 6 * 256 * (2 * 256 + 2 * 128 + 3 * 512)
    assert read["setup"]["dtype"] == "float32"
    for batch in (2, 4):
        assert read[f"nonces_per_second_8_{batch}"] > 0
        assert 0 < read[f"share_8_{batch}"] < 1
    assert "the best" in result.output


def test_a_batch_too_large_for_the_memory_is_skipped(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine.last_states

    def last_states(
        forwards: Sequence[NetworkForward], passed: Passed
    ) -> Iterator[Iterator[torch.Tensor]]:
        for each in forwards:
            each.batches = [*each.batches]
            if max(map(len, each.batches)) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return real(forwards, passed)

    monkeypatch.setattr(engine, "last_states", last_states)
    file = tmp_path / "figures.json"
    result = run(tiny, *FEW, "--batch", "2", "--batch", "4", "--json", file)
    assert result.exit_code == 0, result.output
    assert "nonces_per_second_8_2" in (read := json.loads(file.read_text()))
    assert "nonces_per_second_8_4" not in read


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("gpt5",), "'gpt5' is not a folder"),
        (("qwen", "--size", "huge"), "unknown size 'huge'"),
        (("qwen", "--batch", "0"), "--batch"),
    ],
)
def test_invalid_options_are_refused(args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.output


def test_a_length_above_the_models_limit_is_named(tiny: Path) -> None:
    result = run(tiny, "--seq-len", "100000", "--batch", "1")
    assert result.exit_code == 2
    assert "seq_len 100000 exceeds the model's" in result.output
