"""A calibration in a file: what was measured is read back, and nothing else is taken for it."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proofserve.protocol import SKETCHES, schemes
from proofserve.protocol.identity import Block
from proofserve.protocol.network_schemes import ArtifactScheme
from proofserve.protocol.verdict.directions import shortened
from proofserve.reports import Progress, ReportedError
from proofserve.rounds.records import Workload
from proofserve.verifier.calibration_file import CalibrationFile, checkpoint_shape, merged
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judges import OWN
from proofserve.verifier.noise import left_out, left_out_lines, require_explained
from proofserve.verifier.orders import WorkOptions
from proofserve.verifier.populations import LEAST_RATIO

SHAPE = {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 512}
WORK = Workload(ArtifactScheme(k_dim=12), Block("block", 7), "key", 64)
DIGEST = "d5644de1"
NONCES = 64
OURS = str(OWN.kernels)


def run_of(seed: int, size: float = 1.0, kept: float = 0.5) -> dict[str, Any]:
    """The figures of an honest run whose errors are ``size`` times as long as ours.

    They have ``kept`` of our footprint, as a cosine.
    """
    drawn = np.random.default_rng(seed)
    lengths = 0.01 * size * np.exp(drawn.normal(0.0, 0.2, NONCES))
    footprints = np.clip(drawn.normal(kept, 0.0 if kept == 1.0 else 0.1, NONCES), -1, 1)
    return {
        "lengths": lengths.round(6).tolist(),
        "footprints": {OURS: footprints.round(4).tolist()},
        "cosines": {"int8 g32": drawn.normal(0.0, 0.05, 3).round(4).tolist()},
        "rows": None,
    }


def facts(name: str, *, emulated: bool = False) -> dict[str, Any]:
    said = ("engine", "processor", "torch", "dtype", "kv_dtype", "attention")
    return {"name": name, "emulated": emulated, **dict.fromkeys(said), "ranks": 1}


def population(name: str, seed: int, *, emulated: bool = False, **run: float) -> dict[str, Any]:
    return {"facts": facts(name, emulated=emulated), "figures": run_of(seed, **run)}


def ours(**changes: Any) -> dict[str, Any]:
    """Our own run, the one reference, with some of its figures changed."""
    made = population(OURS, 0, emulated=True, kept=1.0)
    return {**made, "figures": {**made["figures"], **changes}}


def of_amx() -> dict[str, Any]:
    run = {**run_of(0, kept=1.0), "footprints": {"AMX": [1.0] * NONCES}}
    return {"facts": facts("AMX", emulated=True), "figures": run}


HERE, RANKS = population("vLLM here", 1), population("ranks", 2, emulated=True)
FIELDS: dict[str, Any] = {
    "format": "proofserve-calibration",
    "version": 4,
    "model": "tiny-qwen3",
    "shape": SHAPE,
    "weights_digest": DIGEST,
    "served_dtype": "bfloat16",
    "kv_dtype": "auto",
    "scheme": "artifact-v1",
    "stronger_rng": False,
    "seq_len": 64,
    "k_dim": 12,
    "block_hash": "block",
    "public_key": "key",
    "populations": [ours(), HERE, RANKS],
    "suspects": {"int8 g32": [0.02, 0.03, 0.025]},
    "dist_threshold": 0.0261,
    "p_mismatch": 0.01,
    "left_out": None,
}
OTHER_REFERENCE = {**RANKS, "figures": {**RANKS["figures"], "footprints": {"AMX": [0.5] * NONCES}}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(FIELDS))
    return file


def test_what_was_written_is_read(path: Path, tmp_path: Path) -> None:
    calibration = CalibrationFile.read(path)
    assert (calibration.dist_threshold, calibration.p_mismatch) == (0.0261, 0.01)
    again = tmp_path / "again.json"
    calibration.write(again)
    assert CalibrationFile.read(again) == calibration
    # A file of proofs has no conversations.
    assert json.loads(again.read_text()) == {**FIELDS, "groups": None}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_missing_is_named_and_has_no_default(path: Path, field: str) -> None:
    path.write_text(json.dumps({name: FIELDS[name] for name in FIELDS if name != field}))
    with pytest.raises(ReportedError, match=rf"calibration\.json: {field}: Field required"):
        CalibrationFile.read(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "something"}, "format: "),
        ({"version": 5}, "version: "),
        ({"model": ""}, "model: "),
        ({"shape": {"hidden_size": "256"}}, r"shape\.hidden_size: "),
        ({"seq_len": 64.5}, "seq_len: "),
        ({"dist_threshold": "0.02"}, "dist_threshold: "),
        ({"dist_threshold": 0.0}, "dist_threshold: "),
        ({"dist_threshold": 2.5}, "dist_threshold: "),
        ({"dist_threshold": float("nan")}, "dist_threshold: "),
        ({"p_mismatch": 1.0}, "p_mismatch: "),
        ({"treshold": 0.1}, "treshold: "),
        ({"populations": []}, "populations: "),
        ({"populations": [population("a", 1), population("a", 2)]}, ".*two have the same name"),
        ({"populations": [ours(lengths=[0.01])]}, r"populations\.0\.figures\.lengths: "),
        ({"populations": [ours(lengths=[0.1, -1.0])]}, r"populations\.0\.figures\.lengths\.1: "),
        ({"populations": [ours(footprints={})]}, r"populations\.0\.figures\.footprints: "),
        ({"populations": [ours(footprints={OURS: [1.5]})]}, r"populations\.0\.figures\.foot.*"),
        ({"populations": [ours(cosines={"int4": [1.5]})]}, r"populations\.0\.figures\.cosines.*"),
        ({"populations": [ours(lengths=[0.01, 0.0])]}, ".*our own rounding has no error, so"),
        ({"suspects": {"int4": [0.0]}}, r"suspects\.int4\.0: "),
        ({"populations": [ours(lengths=[0.01, 0.01]), HERE]}, ".*vLLM here has nonces that our"),
        ({"populations": [HERE]}, ".*the reference our own rounding is not one of them"),
        ({"populations": [population(OURS, 0)]}, ".*the reference our own rounding is not one"),
        ({"populations": [ours(), OTHER_REFERENCE]}, ".*footprints: ranks has others than the"),
    ],
)
def test_a_broken_field_is_named(path: Path, change: dict[str, Any], named: str) -> None:
    path.write_text(json.dumps(FIELDS | change))
    with pytest.raises(ReportedError, match=rf"calibration\.json: {named}"):
        CalibrationFile.read(path)


def test_a_kernel_may_send_the_published_vector(path: Path) -> None:
    """One in float32 does so, where the float16 of the wire takes its error away."""
    exact = population("exact", 3)
    exact["figures"]["lengths"] = [0.0, *exact["figures"]["lengths"][1:]]
    path.write_text(json.dumps(FIELDS | {"populations": [*FIELDS["populations"], exact]}))
    found = CalibrationFile.read(path).honest(OURS).members[-1]
    assert found.ratios[0] == pytest.approx(LEAST_RATIO)
    assert np.isfinite(found.sizes.log_factors(found.ratios)).all()


@pytest.mark.parametrize("text", ["", "{", "[]", "0.02", "\xff", "[" * 100_000])
def test_a_file_of_something_else_is_refused(path: Path, text: str) -> None:
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ReportedError, match=r"calibration\.json: "):
        CalibrationFile.read(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportedError, match=r"cannot read .*nothing"):
        CalibrationFile.read(tmp_path / "nothing")


def test_what_fits_is_accepted(path: Path) -> None:
    calibration = CalibrationFile.read(path)
    calibration.require(WORK, ["./model"], SHAPE, DIGEST)
    # Where the digest is not known the shape decides, and without a shape the name.
    calibration.require(WORK, ["./model"], SHAPE, None)
    calibration.require(WORK, ["alias", "tiny-qwen3"], None, None)
    calibration.require_served("bfloat16")


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
    with pytest.raises(ReportedError, match=message):
        CalibrationFile.read(path).require(work, ["tiny-qwen3"], SHAPE, DIGEST)


@pytest.mark.parametrize(("measured", "judged"), [*itertools.permutations(SKETCHES)])
def test_both_sketches_are_the_same_numbers_of_a_dense_model_alone(
    path: Path, measured: str, judged: str
) -> None:
    calibration = CalibrationFile.read(path).model_copy(update={"scheme": measured})
    work = Workload(schemes.scheme(judged, k_dim=12), Block("block", 7), "key", WORK.seq_len)
    calibration.require(work, ["tiny-qwen3"], SHAPE, DIGEST, is_dense=True)
    message = f"scheme: the calibration has {measured}, the artifacts have {judged}"
    with pytest.raises(ReportedError, match=message):
        calibration.require(work, ["tiny-qwen3"], SHAPE, DIGEST)
    with pytest.raises(ReportedError, match="scheme: the calibration has artifact-v1"):
        CalibrationFile.read(path).require(work, ["tiny-qwen3"], SHAPE, DIGEST, is_dense=True)


def test_another_model_is_refused(path: Path) -> None:
    calibration = CalibrationFile.read(path)
    # Base and instruct have one shape, and other weights.
    with pytest.raises(
        ReportedError, match="weights_digest: the calibration has d5644de1, the model"
    ):
        calibration.require(WORK, ["tiny-qwen3"], SHAPE, "0badc0de")
    with pytest.raises(
        ReportedError, match="hidden_size: the calibration has 256, the model has 64"
    ):
        calibration.require(WORK, ["tiny-qwen3"], SHAPE | {"hidden_size": 64}, None)
    with pytest.raises(
        ReportedError, match="model: the calibration has tiny-qwen3, the model is other"
    ):
        calibration.require(WORK, ["other"], None, None)


def test_other_dtypes_are_refused(path: Path) -> None:
    calibration = CalibrationFile.read(path)
    message = "served_dtype: the calibration has bfloat16, the checkpoint is served with float16"
    with pytest.raises(ReportedError, match=message):
        calibration.require_served("float16")
    message = "kv_dtype: the calibration has auto, the checkpoint is served with fp8"
    with pytest.raises(ReportedError, match=message):
        calibration.require_served("bfloat16", "fp8")


@pytest.mark.parametrize("version", [2, 3])
def test_an_older_calibration_is_refused_by_its_version_and_says_how_to_measure_anew(
    path: Path, version: int
) -> None:
    old = {"format": "proofserve-calibration", "version": version, "model": "mine", "seq_len": 256}
    path.write_text(json.dumps(old))
    message = f"is a calibration of version {version}, this program reads 4"
    with pytest.raises(ReportedError, match=message):
        CalibrationFile.read(path)
    with pytest.raises(ReportedError, match=r"calibrate noise mine --seq-len 256 --out FILE"):
        CalibrationFile.read(path)


def made(**changes: Any) -> CalibrationFile:
    return CalibrationFile.model_validate(FIELDS | changes)


def names(file: CalibrationFile) -> list[str]:
    return [each.facts.name for each in file.populations]


def test_a_population_added_twice_is_one() -> None:
    mine = made()
    assert merged(mine, mine) == mine
    # A kernel is emulated alike on every machine, up to the noise of float32.
    there = [ours(), population("vLLM there", 3), population("ranks", 4, emulated=True)]
    both = merged(mine, made(populations=there))
    assert names(both) == [OURS, "vLLM here", "ranks", "vLLM there"]
    # Two machines of one kind are two populations.
    again = merged(mine, made(populations=[ours(), population("vLLM here", 5)]))
    assert names(again) == [OURS, "vLLM here", "ranks", "vLLM here (2)"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights_digest": "0bad"}, "weights_digest: this calibration has d5644de1, the added"),
        ({"scheme": "artifact-v1-layers"}, "scheme: this calibration has artifact-v1, the added"),
        ({"seq_len": 256}, "seq_len: this calibration has 64, the added one 256"),
        ({"served_dtype": "float16"}, "served_dtype: this calibration has bfloat16"),
        ({"kv_dtype": "fp8"}, "kv_dtype: this calibration has auto, the added one fp8"),
        ({"block_hash": "other"}, "block_hash: this calibration has block, the added one other"),
        ({"populations": [of_amx()]}, "references: this calibration has .*own.*, the added .*AMX"),
    ],
)
def test_a_calibration_of_something_else_is_not_added(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ReportedError, match=message):
        merged(made(), made(**change))


def test_a_measured_server_clears_beside_the_reference_whose_footprint_it_has() -> None:
    found = made().honest(OURS)
    assert found.reference == OURS
    # Our own run is no population beside itself, and an emulated kernel clears nobody.
    assert found.names == ("vLLM here", "ranks")
    assert set(found.footprints) == {OURS, "vLLM here"}
    # Cosines of errors that are far longer than ours count for less.
    here, own = (np.array(of["figures"]["lengths"]) for of in (HERE, ours()))
    cosines = np.array(HERE["figures"]["footprints"][OURS])
    mean = float(shortened(cosines, found.unit.ratios(here, own)).mean())
    assert found.footprints["vLLM here"].mean == pytest.approx(mean)
    assert mean < float(cosines.mean())
    none = population("no footprint", 3, kept=0.0)
    lost = made(populations=[ours(), none, RANKS]).honest(OURS)
    assert (lost.names, set(lost.footprints)) == (("no footprint", "ranks"), {OURS})


def test_kernels_that_are_alike_hold_when_one_is_left_out() -> None:
    found = left_out(made(), Progress())
    assert found is not None
    assert (found.room, found.convicted) == (1.0, {})
    assert "in 0 of 10000 verifications of 1000 nonces each" in left_out_lines(found)[0]
    assert left_out(made(populations=[ours(), HERE]), Progress()) is None
    assert "one kernel alone" in left_out_lines(None)[0]


def test_a_kernel_that_the_others_would_convict_widens_the_margins_and_is_named() -> None:
    file = made(populations=[ours(), HERE, RANKS, population("noisy", 3, size=3.6)])
    found = left_out(file, Progress(), verifications=500)
    assert found is not None
    assert list(found.convicted) == ["noisy"]
    assert found.room > 1.0
    assert "noisy in " in left_out_lines(found)[0]
    narrow, wide = file.honest(OURS), file.model_copy(update={"left_out": found}).honest(OURS)
    assert wide.lengths.s == pytest.approx(found.room * narrow.lengths.s)
    # So an error counts as so many times shorter in the bet on sizes too.
    of_narrow, of_wide = (each.members[0].sizes for each in (narrow, wide))
    errors = np.array([2.0])
    assert of_wide.log_factors(errors).sum() < of_narrow.log_factors(errors).sum()


def test_margins_that_would_have_to_be_too_wide_are_refused_with_the_kernel() -> None:
    """A node with other weights, measured as one that is trusted, would have its like cleared."""
    cheat = population("vLLM there", 3, size=6.0, kept=0.0)
    file = made(populations=[ours(), HERE, RANKS, cheat])
    message = r"populations: vLLM there would be convicted by the others, even with margins 1\.5 "
    with pytest.raises(ReportedError, match=message):
        left_out(file, Progress(), verifications=500)


def test_a_few_nonces_of_many_suspects_convict_no_honest_kernel() -> None:
    """Honest errors lean to some of them by chance: vectors have 12 values, and eight are few."""
    drawn = np.random.default_rng(0)
    names = [f"suspect {number}" for number in range(20)]

    def leaning(fields: dict[str, Any]) -> dict[str, Any]:
        errors = drawn.normal(size=(len(names), 8, 12))
        cosines = (errors[..., 0] / np.linalg.norm(errors, axis=-1)).tolist()
        return {
            **fields,
            "figures": {**fields["figures"], "cosines": dict(zip(names, cosines, strict=True))},
        }

    kernels = [leaning(each) for each in (ours(), HERE, RANKS)]
    found = left_out(
        made(populations=kernels, suspects=dict.fromkeys(names, [0.012] * 8)), Progress(), 500
    )
    assert found is not None
    assert (found.room, found.convicted) == (1.0, {})


def test_a_measured_node_that_emulated_kernels_convict_has_to_be_trusted_by_name() -> None:
    """Beside another node of its kind it would be explained."""
    cheats = [population(name, 3 + n, size=6.0) for n, name in enumerate(("theirs", "theirs (2)"))]
    file = made(populations=[ours(), HERE, RANKS, *cheats])
    with pytest.raises(
        ReportedError, match=r"populations: theirs would be .* emulated kernels alone"
    ):
        require_explained(file, (), verifications=100)
    with pytest.raises(
        ReportedError, match=r"populations: theirs \(2\) would .*--trust 'theirs \(2\)'"
    ):
        require_explained(file, ["theirs"], verifications=100)
    require_explained(file, ["theirs", "theirs (2)"], verifications=100)
    require_explained(made(), (), verifications=100)
    with pytest.raises(ReportedError, match=r"--trust mine: no such node .*; measured: vLLM here"):
        require_explained(made(), ["mine"], verifications=100)


@pytest.mark.parametrize("nest", [lambda config: config, lambda config: {"text_config": config}])
def test_the_shape_of_a_checkpoint_is_read_from_its_configuration(
    tmp_path: Path, nest: Callable[[dict[str, int]], dict[str, Any]]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(nest(SHAPE | {"vocab_size": 100})))
    assert checkpoint_shape(tmp_path) == SHAPE


def test_what_a_source_says_is_not_completed(path: Path) -> None:
    calibration = CalibrationFile.read(path)
    nothing = ClaimedArtifacts("block", "key", (), ())
    assert calibration.completed(WorkOptions(), nothing) == WorkOptions("artifact-v1", 12, 64)
    all_said = replace(nothing, width=8, seq_len=32, scheme="artifact-v1-layers")
    assert calibration.completed(WorkOptions(), all_said) == WorkOptions()
    given = WorkOptions("sketch-v1", 64, 128)
    assert calibration.completed(given, nothing) == given
