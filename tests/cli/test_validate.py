"""``proofserve validate``: many nodes over HTTP, one ledger, passes that all of a model share."""

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cli.challenged import VALIDATOR
from cli.validated import KEY_VARIABLE, ServedNode, nodes_of, nodes_toml, validator_process
from proofserve.cli.main import app
from proofserve.engines.reference.engine import ReferenceEngine, Run
from proofserve.rounds.records import ProofBatch, Workload
from proofserve.verifier import validator
from support.four_bits import one_thread
from support.models import SmallModels
from support.pace import wait_until
from support.small_bank import small_bank

MODELS = ("qwen3", "llama")
ALPHA = 1e-4
CHALLENGES = """
    SELECT c.*, json_extract(work, '$.block_hash') AS block_hash
    FROM challenges c JOIN rounds r ON r.number = round
"""


@pytest.fixture(scope="module", autouse=True)
def few_kernels() -> Iterator[None]:
    with small_bank(), one_thread():
        yield


@pytest.fixture(autouse=True)
def key_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, VALIDATOR)


Nodes = Mapping[str, Mapping[str, ServedNode]]


@pytest.fixture(scope="module")
def nodes(small_models: SmallModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Ten of each of two models, of which one of the second is not there."""
    folder = tmp_path_factory.mktemp("nodes")
    with ExitStack() as stack:
        yield {
            model: stack.enter_context(
                nodes_of(
                    small_models.get(model),
                    folder,
                    [f"{model}-{number}" for number in range(10 - place)],
                )
            )
            for place, model in enumerate(MODELS)
        }


@pytest.fixture
def few(nodes: Nodes) -> Iterator[Nodes]:
    """Three of each, one of them with 4 bits; as they were after the test."""
    cheat = nodes["qwen3"]["qwen3-1"][1]
    cheat.serves = cheat.four_bits
    yield {model: dict([*of.items()][:3]) for model, of in nodes.items()}
    cheat.serves = cheat.honest


def file_of(folder: Path, models: SmallModels, nodes: Nodes, **validate: object) -> Path:
    about = f"""
        checkpoint = "{models.get("qwen3").parent}/{{model}}-0"
        scheme = "sketch-v1"
        seq_len = 16
    """
    urls = {model: {name: of[0].url for name, of in each.items()} for model, each in nodes.items()}
    usual = {"nonces": 64, "deadline": "600s", "alpha": ALPHA}
    return nodes_toml(folder, urls, about, **{**usual, **validate})


def validate(file: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["validate", str(file), *options])


def rows(folder: Path) -> list[dict[str, Any]]:
    """The challenges in a ledger; none before it is there."""
    try:
        uri = f"file:{folder / 'ledger.sqlite'}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True)) as file:
            file.row_factory = sqlite3.Row
            return [dict(each) for each in file.execute(CHALLENGES)]
    except sqlite3.OperationalError as error:
        if "unable to open" in str(error) or "no such table" in str(error):
            return []
        raise


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Workload, Sequence[Run]]]:
    """What every pass over weights was for."""
    made: list[tuple[Workload, Sequence[Run]]] = []
    compute_all = ReferenceEngine.compute_all

    def counted(self: ReferenceEngine, work: Workload, runs: Sequence[Run]) -> list[ProofBatch]:
        if any(run.public_key for run in runs):
            made.append((work, runs))
        return compute_all(self, work, runs)

    monkeypatch.setattr(ReferenceEngine, "compute_all", counted)
    return made


def test_nodes_of_a_model_share_every_pass(
    few: Nodes,
    small_models: SmallModels,
    tmp_path: Path,
    passes: list[tuple[Workload, Sequence[Run]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[Path] = []
    load = validator.load
    monkeypatch.setattr(
        validator, "load", lambda path, *a, **more: loaded.append(path) or load(path, *a, **more)
    )
    places = {"page": "nodes.html", "metrics": "nodes.prom", "bundles": "bundles"}
    file = file_of(tmp_path, small_models, few, **places)
    result = validate(file, "--json", str(tmp_path / "found.json"))
    assert result.exit_code == 1, result.output
    found = json.loads((tmp_path / "found.json").read_text())["nodes"]
    outcomes = {name: of["outcome"] for name, of in found.items()}
    assert outcomes.pop("qwen3-1") == "fraud"
    assert {*outcomes.values()} == {"honest"}, result.output
    assert loaded == [small_models.get(model) for model in MODELS]
    for block in {work.block.hash for work, _ in passes}:
        of_block = [runs for work, runs in passes if work.block.hash == block]
        asked = Counter(key for runs in of_block for key in {run.public_key for run in runs})
        assert len(asked) == 3
        # No pass was made for a node while another one of its model computed without it.
        assert len(of_block) == max(asked.values())
        # A suspect's weights are made once for all nodes.
        first = [run.network for run in of_block[0]]
        assert len({id(network) for network in first}) == len(first) / 3
        # All that most honest nodes need is in the first.
        assert min(asked.values()) == 1
    labels = 'model="qwen3",node="qwen3-1",outcome="fraud"'
    written = f"proofserve_validate_challenges_total{{{labels}}} 1"
    assert written in (tmp_path / "nodes.prom").read_text()
    assert "int4 g128" in (tmp_path / "nodes.html").read_text()
    (bundle,) = (tmp_path / "bundles").iterdir()
    checked = CliRunner().invoke(app, ["verify-bundle", str(bundle), "--check-only"])
    assert checked.exit_code == 0, checked.output
    again = validate(file)
    assert again.exit_code == 0, again.output
    assert "no node is due: each is asked once in 24 h" in again.output


def killed_when(condition: Callable[[], object], file: Path) -> None:
    """Start a validator, and kill it once the condition holds."""
    process = validator_process(file, said := file.with_name("said"))
    try:
        wait_until(lambda: condition() or not process.is_alive(), 300.0)
        assert process.is_alive(), said.read_text()
    finally:
        process.kill()
        process.join()


def test_twenty_nodes_and_a_validator_that_is_killed_five_times(
    nodes: Nodes, small_models: SmallModels, tmp_path: Path
) -> None:
    first, second = (nodes[model] for model in MODELS)
    every = {name: engine for of in nodes.values() for name, (_, engine) in of.items()}
    every["qwen3-1"].serves = every["qwen3-1"].four_bits
    for engine in every.values():
        engine.asked.clear()
        engine.free = False
    file = file_of(tmp_path, small_models, nodes)
    with file.open("a") as added:
        added.write('\n[nodes.gone]\nurl = "http://127.0.0.1:1"\nmodel = "llama"\n')

    def count(what: str) -> int:
        return sum(each[what] is not None for each in rows(tmp_path))

    def free(engines: Mapping[str, ServedNode], many: int) -> None:
        for _, engine in [*engines.values()][:many]:
            engine.free = True

    kept: dict[int, dict[str, Any]] = {}

    def run(condition: Callable[[], object]) -> None:
        killed_when(condition, file)
        # Or the node would refuse a second challenge of the key.
        wait_until(lambda: all(engine.leases == 0 for engine in every.values()))
        kept.update({e["number"]: e for e in rows(tmp_path) if e["outcome"] is not None})

    # All were asked, and none has answered.
    run(lambda: all(engine.asked for _, engine in first.values()))
    assert len(rows(tmp_path)) == 10
    assert count("answers") == 0
    # Some have answered.
    free(first, 4)
    run(lambda: count("answers") == 4)
    # All have answered, and none is judged; then some are judged.
    free(first, 10)
    run(lambda: count("answers") == 10)
    assert count("outcome") == 0
    run(lambda: count("outcome") > 0)
    # Of the second model some have answered, and the one that is gone is unproved.
    free(second, 5)
    run(lambda: len(rows(tmp_path)) == 20 and count("answers") + count("outcome") >= 16)
    free(second, 9)
    last = validator_process(file, tmp_path / "said")
    last.join()
    told = (tmp_path / "said").read_text()
    assert last.exitcode == 1, told
    every["qwen3-1"].serves = every["qwen3-1"].honest

    found = {each["node"]: each for each in rows(tmp_path)}
    assert len(found) == len(rows(tmp_path)) == 20
    outcomes = {name: each["outcome"] for name, each in found.items()}
    assert (outcomes.pop("qwen3-1"), outcomes.pop("gone")) == ("fraud", "unproved")
    assert {*outcomes.values()} == {"honest"}, told
    assert found["gone"]["kind"] == "not reached"
    # What a killed validator had found stays as it was, and is told.
    assert "qwen3-1 (qwen3): fraud: " in told
    by_number = {each["number"]: each | {"told": 0} for each in rows(tmp_path)}
    assert kept.items() <= by_number.items()
    assert len(kept) >= 11
    for name, engine in every.items():
        asked = {(work.block.hash, work.public_key) for work in engine.asked}
        assert asked == {(found[name]["block_hash"], found[name]["public_key"])}
    assert sum(each["alpha"] for each in found.values()) == pytest.approx(20 * ALPHA / 367)
