"""A threshold in a file: what was measured is read back, and nothing else is taken for it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proofserve.lab.calibrate.calibration_file import (
    CalibrationFile,
    checkpoint_shape,
    fit_of,
    read,
)
from proofserve.lab.client.errors import LabError
from proofserve.lab.verify.claimed import ClaimedArtifacts, WorkOptions
from proofserve.lab.verify.judges import Chances
from proofserve.protocol.artifact import ArtifactScheme
from proofserve.protocol.identity import Block
from proofserve.rounds.records import Workload

SHAPE = {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 512}
WORK = Workload(ArtifactScheme(k_dim=12), Block("block", 7), "key", 64)
FIELDS: dict[str, Any] = {
    "format": "proofserve-calibration",
    "version": 2,
    "model": "tiny-qwen3",
    "shape": SHAPE,
    "scheme": "artifact-v1",
    "stronger_rng": False,
    "seq_len": 64,
    "k_dim": 12,
    "dtype": "float32",
    "engines": ["reference:float32", "vllm"],
    "quantiles": {"0.5": 0.011, "0.9": 0.016, "0.99": 0.022, "1": 0.026},
    "dist_threshold": 0.0261,
    "p_mismatch": 0.01,
    "p_mismatch_interval": [0.0, 0.0092],
    "distances": [0.01, 0.012, 0.026],
    "fit": {"s": 0.011, "nu1": 20.0, "nu2": 12.0, "norms": [1.0, 1.0, 1.02, 1.0], "tail": 1.1},
    "paired": None,
    "suspects": {"int8 g32": {"honest_sd": 0.12, "margin": 0.05, "own_mean": 0.44, "own_sd": 0.14}},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(FIELDS))
    return file


def test_what_was_written_is_read(path: Path, tmp_path: Path) -> None:
    calibration = read(path)
    assert (calibration.dist_threshold, calibration.p_mismatch) == (0.0261, 0.01)
    again = tmp_path / "again.json"
    calibration.write(again)
    assert read(again) == calibration
    # A file of proofs has no figures of greedy answers.
    assert json.loads(again.read_text()) == {**FIELDS, "greedy": None}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_missing_is_named_and_has_no_default(path: Path, field: str) -> None:
    path.write_text(json.dumps({name: FIELDS[name] for name in FIELDS if name != field}))
    with pytest.raises(LabError, match=rf"calibration\.json: {field}: Field required"):
        read(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "something"}, "format: "),
        ({"version": 1}, "version: "),
        ({"model": ""}, "model: "),
        ({"shape": {"hidden_size": "256"}}, r"shape\.hidden_size: "),
        ({"seq_len": 64.5}, "seq_len: "),
        ({"engines": ["vllm"]}, r"engines\.1: "),
        ({"dist_threshold": "0.02"}, "dist_threshold: "),
        ({"dist_threshold": 0.0}, "dist_threshold: "),
        ({"dist_threshold": 2.5}, "dist_threshold: "),
        ({"dist_threshold": float("nan")}, "dist_threshold: "),
        ({"p_mismatch": 1.0}, "p_mismatch: "),
        ({"p_mismatch_interval": [0.0, 2.0]}, r"p_mismatch_interval\.1: "),
        ({"quantiles": {"0.5": None}}, r"quantiles\.0\.5: "),
        ({"treshold": 0.1}, "treshold: "),
        ({"distances": [0.01]}, "distances: "),
        ({"distances": [0.01, 0.0]}, r"distances\.1: "),
        ({"fit": FIELDS["fit"] | {"norms": [1.0]}}, r"fit\.norms: "),
        ({"fit": FIELDS["fit"] | {"norms": [1.0, 0.5, 1.0, 1.0]}}, r"fit\.norms\.1: "),
        ({"suspects": {"int4": {}}}, r"suspects\.int4\.honest_sd: "),
    ],
)
def test_a_broken_field_is_named(path: Path, change: dict[str, Any], named: str) -> None:
    path.write_text(json.dumps(FIELDS | change))
    with pytest.raises(LabError, match=rf"calibration\.json: {named}"):
        read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "0.02", "\xff", "[" * 100_000])
def test_a_file_of_something_else_is_refused(path: Path, text: str) -> None:
    path.write_text(text, encoding="latin-1")
    with pytest.raises(LabError, match=r"calibration\.json: "):
        read(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"cannot read .*nothing"):
        read(tmp_path / "nothing")


def test_what_fits_is_accepted(path: Path) -> None:
    calibration = read(path)
    calibration.require(WORK, ["./model"], SHAPE)
    # Where the shape of the judged model is not known, its name decides.
    calibration.require(WORK, ["alias", "tiny-qwen3"], None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 256}, "seq_len: the calibration has 64, the artifacts have 256"),
        (
            {"scheme": ArtifactScheme(k_dim=8)},
            "k_dim: the calibration has 12, the artifacts have 8",
        ),
        (
            {"scheme": ArtifactScheme(k_dim=12, layer_reflections=True)},
            "scheme: the calibration has artifact-v1, the artifacts have artifact-v1-layers",
        ),
    ],
)
def test_other_artifacts_are_refused_by_the_name_of_the_field(
    path: Path, change: dict[str, Any], message: str
) -> None:
    values = {"scheme": WORK.scheme, "seq_len": WORK.seq_len} | change
    work = Workload(values["scheme"], Block("block", 7), "key", values["seq_len"])
    with pytest.raises(LabError, match=message):
        read(path).require(work, ["tiny-qwen3"], SHAPE)


def test_another_model_is_refused(path: Path) -> None:
    calibration = read(path)
    with pytest.raises(LabError, match="hidden_size: the calibration has 256, the model has 64"):
        calibration.require(WORK, ["tiny-qwen3"], SHAPE | {"hidden_size": 64})
    with pytest.raises(LabError, match="model: the calibration has tiny-qwen3, the model is other"):
        calibration.require(WORK, ["other"], None)


def test_the_validators_dtype_is_the_calibrations(path: Path) -> None:
    calibration = read(path)
    assert calibration.validator_dtype(None) == "float32"
    assert calibration.validator_dtype("float32") == "float32"
    with pytest.raises(LabError, match="dtype: the calibration has float32, --dtype is bfloat16"):
        calibration.validator_dtype("bfloat16")


@pytest.mark.parametrize("nest", [lambda config: config, lambda config: {"text_config": config}])
def test_the_shape_of_a_checkpoint_is_read_from_its_configuration(
    tmp_path: Path, nest: Callable[[dict[str, int]], dict[str, Any]]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(nest(SHAPE | {"vocab_size": 100})))
    assert checkpoint_shape(tmp_path) == SHAPE


def with_distances(path: Path, count: int, largest: float, tail: float) -> CalibrationFile:
    distances = [0.01] * (count - 1) + [largest]
    fields = FIELDS | {"distances": distances, "fit": FIELDS["fit"] | {"tail": tail}}
    path.write_text(json.dumps(fields))
    return read(path)


def test_few_distances_or_a_heavy_tail_carry_no_small_alpha(path: Path) -> None:
    def carried(count: int, largest: float, tail: float, wanted: Chances) -> Chances:
        made = with_distances(path, count, largest, tail)
        return made.carried(wanted, made.fit)

    wanted = Chances(1e-6, 1e-3)
    assert carried(1000, 0.02, 1.2, wanted) == wanted
    assert carried(999, 0.02, 1.2, wanted).alpha == pytest.approx(1 / 999)
    assert carried(1000, 0.2, 1.8, wanted).alpha == pytest.approx(1e-3)
    assert carried(20, 0.02, 1.2, Chances(0.1, 0.1)).alpha == 0.1


def test_the_tail_of_a_fit_is_the_largest_distance_over_the_expected_one() -> None:
    drawn = np.random.default_rng(0)
    honest = 0.01 * np.sqrt(drawn.chisquare(20, 2000) / drawn.chisquare(20, 2000))
    assert 0.7 < fit_of(honest).tail < 1.3
    assert fit_of(np.append(honest, 0.2)).tail > 3


def test_what_a_source_says_is_not_completed(path: Path) -> None:
    calibration = read(path)
    nothing = ClaimedArtifacts("block", "key", (), ())
    assert calibration.completed(WorkOptions(), nothing) == WorkOptions("artifact-v1", 12, 64)
    all_said = replace(nothing, width=8, seq_len=32, scheme="artifact-v1-layers")
    assert calibration.completed(WorkOptions(), all_said) == WorkOptions()
    given = WorkOptions("sketch-v1", 64, 128)
    assert calibration.completed(given, nothing) == given


def test_a_calibration_of_no_noise_is_never_written() -> None:
    with pytest.raises(ValueError, match="dist_threshold"):
        CalibrationFile(**(FIELDS | {"engines": ("vllm", "vllm"), "dist_threshold": 0.0}))
