import json
import struct
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from proofserve.reports import Report
from proofserve.verifier.target import (
    LAYER_HOOKS,
    SIGN_FLIPS,
    THEORY_MEAN,
    THEORY_SD,
    Sample,
    TargetRadius,
    calibrate,
    rates_table,
    report_of,
    write_histograms,
)

SAMPLE = Sample(nonces=2000, blocks=3, keys=2, seq_len=8, batch_size=32)
WHERE: dict[str, str | int] = {"cores": 2, "processor": "a fast one"}


def radius(shift: float = 0.0) -> TargetRadius:
    """Blocks whose means lie ``shift`` standard deviations apart."""
    draw = np.random.default_rng(5)
    distances = draw.normal(THEORY_MEAN, THEORY_SD, SAMPLE.shape)
    distances += THEORY_SD * shift * np.arange(3).reshape(3, 1, 1)
    return calibrate(distances, 0.10)


def reported(method: str, shift: float = 0.0) -> Report:
    return report_of(radius(shift), "toy", method, SAMPLE, seconds=60.0, where=WHERE)


def figures(report: Report) -> dict[str, float | None]:
    return {figure.name: figure.value for figure in report.figures}


def printed(methods: dict[str, TargetRadius]) -> str:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(rates_table(methods))
    return captured.get()


def test_equal_blocks_differ_by_no_more_than_chance() -> None:
    report = reported(SIGN_FLIPS)
    found = figures(report)
    assert report.passed
    assert found["spread_beyond_sampling"] == 0.0
    assert found["mean"] == pytest.approx(THEORY_MEAN, abs=5e-4)
    assert found["sd"] == pytest.approx(THEORY_SD, rel=0.05)
    assert found["r_target"] == pytest.approx(1.4042, abs=5e-4)
    assert found["nonces_per_second"] == 100.0


def test_unequal_blocks_break_the_limit_of_sign_flips() -> None:
    report = reported(SIGN_FLIPS, shift=0.5)
    found = figures(report)
    spread, chance = found["spread"], found["sampling_spread"]
    assert spread is not None
    assert chance is not None
    assert 10.0 < spread < 20.0
    assert found["spread_beyond_sampling"] == pytest.approx(spread - chance)
    assert [figure.name for figure in report.figures if figure.passed is False] == [
        "spread_beyond_sampling"
    ]


def test_layer_hooks_have_no_limit_to_break() -> None:
    report = reported(LAYER_HOOKS, shift=0.5)
    assert report.passed
    assert all(figure.limit is None for figure in report.figures)
    assert "no limit" in {f.name: f.meaning for f in report.figures}["spread_beyond_sampling"]


def test_the_file_explains_the_figures(tmp_path: Path) -> None:
    reported(SIGN_FLIPS).write(tmp_path / "figures.json")
    read = json.loads((tmp_path / "figures.json").read_text())
    assert read["limits"] == {"spread_beyond_sampling": "<= 2"}
    assert (read["setup"]["model"], read["setup"]["method"]) == ("toy", "sign_flips")
    assert (read["setup"]["rate"], read["setup"]["keys"]) == (0.10, 2)
    low, high = read["windows"]["r_target_interval"]
    assert low < read["r_target"] < high
    rates = np.array(read["windows"]["block_key_rates"])
    assert rates.shape == (3, 2)
    assert rates.mean(axis=1) == pytest.approx(read["windows"]["block_rates"])
    assert read["windows"]["block_means"] == pytest.approx([THEORY_MEAN] * 3, abs=1e-3)
    assert read["windows"]["block_sds"] == pytest.approx([THEORY_SD] * 3, rel=0.1)


def test_the_methods_stand_side_by_side() -> None:
    even, uneven = radius(), radius(shift=0.5)
    text = printed({SIGN_FLIPS: even, LAYER_HOOKS: uneven})
    (heading,) = [line for line in text.splitlines() if "sign flips" in line]
    assert heading.index("sign flips") < heading.index("layer hooks")
    totals = [line for line in text.splitlines() if "all" in line]
    for line, left, right in zip(totals, even.block_rates, uneven.block_rates, strict=True):
        assert f"{100 * left:.1f}" in line
        assert f"{100 * right:.1f}" in line


def test_the_picture_is_a_png_with_a_panel_per_model(tmp_path: Path) -> None:
    methods = {name: radius() for name in (SIGN_FLIPS, LAYER_HOOKS)}
    heights = []
    for models in (["one"], ["one", "two"]):
        # Whatever the name says.
        file = tmp_path / f"{len(models)}.picture"
        write_histograms(dict.fromkeys(models, methods), file)
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        heights.append(struct.unpack(">I", content[20:24])[0])
    assert heights[1] == 2 * heights[0]
