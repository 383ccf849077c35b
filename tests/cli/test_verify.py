import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.protocol.codec import encode
from proofserve.protocol.identity import Block
from proofserve.protocol.network_schemes import ArtifactScheme
from proofserve.receiver.callbacks import Generated
from proofserve.receiver.store import ReceiverStore
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve.rounds.records import Workload
from proofserve.verifier import judging
from proofserve_lab.checkpoints import claims_of_model
from support.four_bits import engine_of, one_thread
from support.models import TINY_THRESHOLD, SmallModels
from support.small_bank import small_bank
from support.stub_node import Habits, stub_node

WORK = Work("tiny", seq_len=32)
# So many, because the direction test has to rule out every suspect with 12 values a nonce. One
# kernel in a hundred orders of nonces takes 200.
NONCES = 256
CLOSE = ("--dist-threshold", TINY_THRESHOLD)
Body = dict[str, Any]


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, args)])


@pytest.fixture(scope="module", autouse=True)
def few_kernels() -> Iterator[None]:
    """README's path and the demo verify with the whole bank."""
    with small_bank():
        yield


@pytest.fixture(scope="module")
def published(tiny: Path) -> Body:
    """The artifacts that an honest node of the tiny model published."""
    claims = claims_of_model(tiny, WORK, range(NONCES))
    return {
        "public_key": WORK.public_key,
        "block_hash": WORK.block_hash,
        "artifacts": [{"nonce": c.nonce, "vector_b64": c.vector_b64} for c in claims],
        "encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"},
        "params": {"seq_len": 32},
        "node_id": 0,
        "node_count": 1,
    }


@pytest.fixture(scope="module")
def measured(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str | Path, ...]:
    """The tiny model and its calibration: the emulated kernels."""
    file = tmp_path_factory.mktemp("calibration") / "calibration.json"
    few = ("--nonces", "48", "--emulated", "48", "--seq-len", "32", "--bank", "32")
    short = ("--verifications", "100")
    with one_thread():
        options = ["calibrate", "noise", str(tiny), *few, *short, "--out", str(file)]
        result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    return "--model", tiny, "--calibration", file


def received(folder: Path, body: Body) -> Path:
    """A new file of ``proofserve receive`` with the artifacts of ``body``."""
    path = folder / f"{uuid4()}.sqlite"
    with closing(ReceiverStore.open(path)) as store:
        callback = Generated.model_validate({**body, "block_height": 7, "node_id": 0})
        store.add_generated(callback)
    return path


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Body], Path]:
    def written(body: Body) -> Path:
        path = tmp_path / "artifacts.json"
        path.write_text(json.dumps(body))
        return path

    return written


def test_an_honest_node_is_honest(
    tiny: Path, published: Body, write: Callable[[Body], Path], tmp_path: Path
) -> None:
    record = tmp_path / "outcome.json"
    result = run(write(published), "--model", tiny, *CLOSE, "--seed", "42", "--json", record)
    assert result.exit_code == 0, result.output
    assert "honest" in result.output
    assert (
        f"10 of {NONCES} nonces recomputed (to reproduce this sample: --seed 42)" in result.output
    )
    assert "The seed was given: this holds only if the node did not know it" in result.output
    assert "count     honest: 0 mismatches, likelihood ratio 0.000986" in result.output
    outcome = json.loads(record.read_text())
    assert outcome["verdict"] == "honest"
    assert outcome["nonces_used"] == 10
    assert outcome["seed"] == "42"
    (finding,) = outcome["findings"]
    assert 0 < finding["figures"]["likelihood_ratio"] < 1e-3
    test = {"p_honest": 0.001, "p_fraud": 0.5, "alpha": 1e-6, "beta": 1e-3}
    assert outcome["count"]["test"] == test


def test_something_has_to_recompute() -> None:
    result = run("a.json", *CLOSE)
    assert result.exit_code == 3, result.output
    assert result.output == "give --model CHECKPOINT, --recompute-url NODE, or both\n"
    alone = run("a.json", "--recompute-url", "http://x", "--engine", "vllm")
    assert "--engine serves the checkpoint of --model" in alone.output
    itself = run("http://x", "--recompute-url", "http://x")
    assert itself.exit_code == 3, itself.output
    assert "a node is no judge of itself" in itself.output


@pytest.mark.parametrize("test", ["count", "paired"])
def test_without_a_threshold_one_line_says_how_to_measure_it(
    tiny: Path, published: Body, write: Callable[[Body], Path], test: str
) -> None:
    result = run(write(published), "--model", tiny, "--test", test)
    assert result.exit_code == 3, result.output
    (said,) = [line for line in result.output.splitlines() if "calibrate" in line]
    assert "proofserve calibrate noise MODEL --seq-len N --out FILE" in said


def test_without_a_calibration_an_honest_node_is_cleared_and_four_bits_are_fraud(
    tiny: Path, published: Body, write: Callable[[Body], Path], tmp_path: Path
) -> None:
    record = tmp_path / "outcome.json"
    with one_thread():
        honest = run(write(published), "--model", tiny, "--json", record)
    assert honest.exit_code == 0, honest.output
    assert "Honest nodes: none; kernels were emulated instead." in honest.output
    outcome = json.loads(record.read_text())
    assert {each["test"]: each["result"] for each in outcome["findings"]} == {
        "direction": "honest",
        "footprint": "honest",
    }
    assert outcome["closest"] == "our own rounding"
    with one_thread():
        fraud = run(write(published | {"artifacts": in_four_bits(tiny)}), "--model", tiny)
    assert fraud.exit_code == 1, fraud.output
    assert "direction fraud: int4" in fraud.output


def in_four_bits(model: Path) -> list[Body]:
    """The artifacts of a node that serves the tiny model's weights in 4 bits."""
    work = Workload(ArtifactScheme(), Block(WORK.block_hash, 7), WORK.public_key, WORK.seq_len)
    with one_thread():
        forged = engine_of(model, "bfloat16", four_bits=True).compute(work, range(12)).values
    return [{"nonce": n, "vector_b64": text} for n, text in enumerate(encode(forged))]


def test_verify_reads_threshold_rate_and_dtype_from_a_calibration(
    tiny: Path,
    measured: tuple[str | Path, ...],
    published: Body,
    write: Callable[[Body], Path],
    tmp_path: Path,
) -> None:
    record = tmp_path / "outcome.json"
    result = run(write(published), *measured, "--json", record)
    assert result.exit_code == 0, result.output
    origin = "calibration of qwen3-0: 0 measured and 6 emulated kernels, 48 nonces"
    assert f"Honest nodes: {origin}." in result.output
    assert "A node that forges 30% of its nonces or more would have been cleared" in result.output
    outcome, fields = json.loads(record.read_text()), json.loads(Path(measured[-1]).read_text())
    # Sizes alone clear nobody.
    assert {each["test"]: each["result"] for each in outcome["findings"]} == {
        "paired": "undecided",
        "direction": "honest",
        "footprint": "honest",
    }
    assert outcome["excluded_share"] == 0.3
    assert outcome["closest"] == "our own rounding"
    assert outcome["threshold_from"] == origin
    sizes = run(write(published), *measured, "--test", "paired")
    assert sizes.exit_code == 2, sizes.output
    assert "paired alone can only convict: --test footprint besides" in sizes.output
    counted = run(write(published), *measured, "--test", "count", "--json", record)
    assert counted.exit_code == 0, counted.output
    rule = json.loads(record.read_text())["count"]
    assert rule["dist_threshold"] == fields["dist_threshold"] < 0.05
    assert rule["test"]["p_honest"] == fields["p_mismatch"] == 0.01
    fraud = run(write(published | {"artifacts": in_four_bits(tiny)}), *measured)
    assert fraud.exit_code == 1, fraud.output
    assert "fraud: int4" in fraud.output or "paired    fraud" in fraud.output


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"params": {"seq_len": 64}}, (), "seq_len: the calibration has 32, the artifacts have 64"),
        ({}, ("--scheme", "artifact-v1-layers"), "scheme: the calibration has artifact-v1, the"),
        ({}, ("--p-mismatch", "0.001"), "p_mismatch: "),
        ({}, CLOSE, "two thresholds: give --calibration or --dist-threshold"),
    ],
)
def test_a_calibration_of_another_deployment_gives_no_verdict(
    measured: tuple[str | Path, ...],
    published: Body,
    write: Callable[[Body], Path],
    change: Body,
    options: tuple[str, ...],
    message: str,
) -> None:
    result = run(write(published | change), *measured, *options)
    assert result.exit_code == 3, result.output
    assert message in result.output


def test_a_calibration_of_another_model_or_a_broken_one_gives_no_verdict(
    small_models: SmallModels,
    measured: tuple[str | Path, ...],
    published: Body,
    write: Callable[[Body], Path],
    tmp_path: Path,
) -> None:
    calibration = Path(measured[-1])
    source = write(published)
    other = run(source, "--model", small_models.flat(), "--calibration", calibration)
    assert other.exit_code == 3, other.output
    assert "weights_digest: the calibration has " in other.output
    with stub_node() as (_, url):
        served = run(source, "--recompute-url", url, "--calibration", calibration)
    assert served.exit_code == 3, served.output
    assert "model: the calibration has qwen3-0, the model is stub" in served.output
    broken = tmp_path / "broken.json"
    fields = json.loads(calibration.read_text())
    broken.write_text(json.dumps(fields | {"dist_threshold": "0.1"}))
    refused = run(source, *measured[:-1], broken)
    assert refused.exit_code == 3, refused.output
    assert "broken.json: dist_threshold: " in refused.output


def test_another_model_is_fraud(
    small_models: SmallModels, published: Body, write: Callable[[Body], Path], tmp_path: Path
) -> None:
    record = tmp_path / "outcome.json"
    other = small_models.get("qwen3", seed=1)
    result = run(write(published), "--model", other, *CLOSE, "--json", record)
    assert result.exit_code == 1, result.output
    assert f"3 of {NONCES} nonces recomputed" in result.output
    outcome = json.loads(record.read_text())
    assert [m["reason"] for m in outcome["mismatches"]] == ["too far"] * 3
    assert min(m["distance"] for m in outcome["mismatches"]) > 0.1


def test_a_fixed_test_recomputes_all_nonces_and_may_be_undecided(
    tiny: Path, published: Body, write: Callable[[Body], Path]
) -> None:
    path = write(published)
    whole = run(path, "--model", tiny, *CLOSE, "--fixed")
    assert whole.exit_code == 0, whole.output
    assert f"{NONCES} of {NONCES} nonces recomputed" in whole.output
    assert "p-value 1" in whole.output
    little = run(path, "--model", tiny, *CLOSE, "--fixed", "--nonces", "2")
    assert little.exit_code == 2
    assert "undecided" in little.output


def test_weights_of_four_bits_are_fraud(
    tiny: Path, published: Body, write: Callable[[Body], Path]
) -> None:
    artifacts = in_four_bits(tiny)
    result = run(write(published | {"artifacts": artifacts}), "--model", tiny, *CLOSE)
    assert result.exit_code == 1, result.output
    assert "3 of 12 nonces recomputed" in result.output


def test_a_receivers_file_and_a_calibration_are_enough(
    published: Body, measured: tuple[str | Path, ...], tmp_path: Path
) -> None:
    """A receiver knows neither seq_len nor k_dim; the calibration does."""
    path = received(tmp_path, published)
    honest = run(path, *measured, "--lane", "0:1")
    assert honest.exit_code == 0, honest.output
    wrong = run(path, *measured, "--k-dim", "8")
    assert wrong.exit_code == 3
    assert "k_dim: the calibration has 12, the artifacts have 8" in wrong.output


def test_a_receivers_file_of_another_scheme_convicts_nobody_unless_it_was_not_asked_for(
    published: Body, measured: tuple[str | Path, ...], tmp_path: Path
) -> None:
    """A round of sketches, and a calibration of the default scheme."""
    wide = encode(np.ones((len(published["artifacts"]), 128), np.float32))
    sketches = [{"nonce": n, "vector_b64": text} for n, text in enumerate(wide)]
    path = received(tmp_path, published | {"artifacts": sketches})
    other = run(path, *measured)
    assert other.exit_code == 3, other.output
    assert "k_dim: every vector of the source has 128 values, a vector of artifact-v1 here 12" in (
        other.output
    )
    # The node was asked for 12 values: then it has answered with none that is a vector.
    asked = run(path, *measured, "--k-dim", "12")
    assert asked.exit_code == 1, asked.output
    assert "malformed" in asked.output
    # A good vector among the others shows that the node knows the shape of the round.
    mixed = published["artifacts"][:1] + sketches[1:]
    known = run(received(tmp_path, published | {"artifacts": mixed}), *measured)
    assert known.exit_code == 1, known.output


def test_missing_artifacts_convict(
    tiny: Path, published: Body, write: Callable[[Body], Path]
) -> None:
    claimed = published | {"artifacts": [], "nonces": list(range(30))}
    result = run(write(claimed), "--model", tiny, *CLOSE)
    assert result.exit_code == 1, result.output
    assert "missing" in result.output


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"artifacts": []}, (), "there is no artifact to verify"),
        ({"params": {}}, (), "the source does not say seq_len; give --seq-len"),
        ({}, ("--k-dim", "8"), "--k-dim 8 contradicts the source, which says 12"),
        ({"public_key": None}, (), "public_key: Input should be a valid string"),
        ({"params": {"seq_len": 10**6}}, (), "seq_len 1000000 exceeds the model's"),
        ({}, ("--p-fraud", "0.0001"), "p_fraud: 0.0001 is not above the honest rate"),
        ({}, ("--block-hash", "other"), "block_hash: expected is other, "),
        ({}, ("--scheme", "distance-v1"), "distance-v1 has no artifacts"),
        ({}, ("--engine", "vllm", "--recompute-url", "http://x"), "leave --recompute-url out"),
        ({}, ("--engine", "torch"), "--engine torch: give vllm, or vllm:tp2 for two ranks"),
        ({}, ("--engine", "vllm:tp65"), "vllm:tp65: 65 ranks are outside 1..64"),
        ({}, ("--engine", "vllm", "--test", "count"), "add --test exact"),
        ({}, ("--test", "exact"), "give an engine, --recompute-url NODE or --engine vllm"),
        ({}, ("--test", "scale"), "choose from exact, count, paired, direction, footprint"),
        ({}, ("--p-mismatch", "1"), "p_mismatch: Input should be less than 1"),
        ({}, ("--dist-threshold", "nan"), "dist_threshold: nan is not a finite number"),
        ({"scheme": "artifact-v1-layers"}, ("--scheme", "artifact-v1"), "contradicts the source"),
        ({"params": {"seq_len": 32}}, ("--seq-len", "64"), "--seq-len 64 contradicts the source"),
        ({}, ("--json", "/nowhere/outcome.json"), "cannot write /nowhere/outcome.json"),
    ],
)
def test_artifacts_that_cannot_be_judged_give_no_verdict(
    tiny: Path,
    published: Body,
    write: Callable[[Body], Path],
    change: Body,
    options: tuple[str, ...],
    message: str,
) -> None:
    result = run(write(published | change), "--model", tiny, *CLOSE, *options)
    assert result.exit_code == 3, result.output
    assert message in result.output


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((), "source"),
        (("a.json", "--dist-threshold", "near"), "--dist-threshold"),
        (("a.json", *CLOSE, "--nonces", "0"), "--nonces"),
        (("a.json", *CLOSE, "--modle", "m"), "--modle"),
        (("a.json", "b.json", *CLOSE), "b.json"),
    ],
)
def test_a_usage_error_gives_no_verdict_and_keeps_its_message(
    args: tuple[str, ...], named: str
) -> None:
    result = run(*args)
    assert result.exit_code == 3, result.output
    assert "Usage: " in result.output
    assert named in result.output


def test_a_crash_is_not_reported_as_fraud(
    tiny: Path, published: Body, write: Callable[[Body], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_args: object) -> None:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(judging, "draw", crash)
    result = run(write(published), "--model", tiny, *CLOSE)
    assert result.exit_code == 3, result.output
    assert "KeyError: 'a bug of ours'" in result.output


def test_verify_reads_the_scheme_from_the_source(
    tiny: Path, published: Body, write: Callable[[Body], Path]
) -> None:
    layers = published | {"scheme": "artifact-v1-layers"}
    result = run(write(layers), "--model", tiny, *CLOSE)
    # The vectors are of the other scheme.
    assert result.exit_code == 1, result.output


def test_two_nodes_need_no_checkpoint(write: Callable[[Body], Path]) -> None:
    with stub_node() as (stub, url), NodeClient(url) as node:
        claims = node.artifacts(Work("stub", seq_len=32), range(20))
        body = {
            "public_key": "lab-key",
            "block_hash": "lab-block",
            "artifacts": [{"nonce": a.nonce, "vector_b64": a.vector_b64} for a in claims],
            "encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"},
            "node_id": 0,
            "node_count": 1,
        }
        path = write(body)
        honest = run(path, "--recompute-url", url, *CLOSE, "--seq-len", "32")
        assert honest.exit_code == 0, honest.output
        other = run(
            write(body | {"public_key": "other"}), "--recompute-url", url, *CLOSE, "--seq-len", "32"
        )
        assert other.exit_code == 1, other.output
        layers = write(body | {"scheme": "artifact-v1-layers"})
        refused = run(layers, "--recompute-url", url, *CLOSE, "--seq-len", "32")
        assert refused.exit_code == 3, refused.output
        assert "scheme mismatch" in refused.output
        stub.habits.failing_nonce = 7
        whole = (*CLOSE, "--test", "count", "--fixed")
        gap = run(write(body), "--recompute-url", url, *whole, "--seq-len", "32")
        assert gap.exit_code == 3, gap.output
        assert "computed no vector for" in gap.output
    options = ("--recompute-url", url, *CLOSE, "--seq-len", "32")
    with stub_node(Habits(api_key="s3cret")) as (_, keyed):
        path = write(body)
        asked = run(path, "--recompute-url", keyed, *options[2:])
        assert (asked.exit_code, "401" in asked.output) == (3, True)
        mine = run(path, "--recompute-url", keyed, *options[2:], "--recompute-api-key", "s3cret")
        assert mine.exit_code == 0, mine.output
        # The key of the one node is nothing for the other.
        source = run(keyed, *options, "--api-key", "s3cre")
        assert (source.exit_code, "401" in source.output) == (2, True)
        assert "unproved" in source.output
    gone = run(path, "--recompute-url", url, *CLOSE, "--seq-len", "32")
    assert gone.exit_code == 3
    assert url in gone.output


def test_the_help_has_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "proofserve verify artifacts.json --model" in result.output
