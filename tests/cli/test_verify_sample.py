"""Which nonces ``verify`` asks for: others each time, unless the seed is given."""

import json
from pathlib import Path

from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.protocol.nonces import draw
from support.stub_node import stub_node


class Drawn:
    """Claims none of which is right, and the nonces that a run of ``verify`` asked for."""

    def __init__(self, source: Path, node: str, folder: Path) -> None:
        self._source, self._node, self._record = source, node, folder / "outcome.json"

    def nonces(self, *options: str) -> tuple[list[int], str]:
        """The nonces of a sample in its order, and its seed."""
        whole = ("--fixed", "--nonces", "12", "--seq-len", "32", "--dist-threshold", "0.1")
        by = ("--recompute-url", self._node, "--json", str(self._record))
        CliRunner().invoke(app, ["verify", str(self._source), *by, *whole, *options])
        outcome = json.loads(self._record.read_text())
        return [each["nonce"] for each in outcome["mismatches"]], outcome["seed"]


def test_a_forger_cannot_know_the_sample(tmp_path: Path) -> None:
    """It computed the 40 of 128 nonces that seed 0 draws first, and invented the others."""
    computed = draw(range(128), "0", 40)
    body = {
        **{"public_key": "lab-key", "block_hash": "lab-block", "nonces": list(range(128))},
        **{"artifacts": [], "encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"}},
    }
    source = tmp_path / "artifacts.json"
    source.write_text(json.dumps(body))
    with stub_node() as (_, url):
        drawn = Drawn(source, url, tmp_path)
        (first, seed), (other, _) = drawn.nonces(), drawn.nonces()
        again, recorded = drawn.nonces("--seed", seed)
        assert set(drawn.nonces("--seed", "0")[0]) <= set(computed)
    # By chance, all 12 are among the 40 in one of a million runs.
    assert not set(first) <= set(computed)
    assert not set(other) <= set(computed)
    assert first != other
    assert (again, recorded) == (first, seed)
