import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proofserve.protocol.verdict.comparison import Claim
from proofserve.receiver.callbacks import Generated
from proofserve.receiver.store import ReceiverStore
from proofserve.reports import ReportedError
from proofserve.verifier.claims import ClaimedArtifacts, Selection, read_file

ANY = Selection()
BODY: dict[str, Any] = {
    "public_key": "key",
    "block_hash": "block",
    "block_height": 7,
    "node_id": 0,
    "artifacts": [{"nonce": 4, "vector_b64": "AAA="}, {"nonce": 2, "vector_b64": "!"}],
    "encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"},
}
CLAIMS = (Claim(4, "AAA="), Claim(2, "!"))


def test_a_json_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "artifacts.json"
    path.write_text(json.dumps(BODY))
    assert read_file(path, ANY).claims == CLAIMS


def test_a_receivers_file_is_read_while_the_receiver_runs(tmp_path: Path) -> None:
    path = tmp_path / "a file?.sqlite"
    with closing(ReceiverStore.open(path)) as store:
        store.add_generated(Generated.model_validate(BODY))
        store.add_generated(Generated.model_validate(BODY | {"block_hash": "other"}))
        claimed = read_file(path, Selection(block_hash="block"))
        expected = ClaimedArtifacts("block", "key", (2, 4), CLAIMS[::-1])
        assert replace(claimed, unknown_lane=None) == expected
        assert "a receiver does not know which nonces were owed" in (claimed.unknown_lane or "")
        with pytest.raises(
            ReportedError, match=r"several nodes or blocks fit(?s:.*)2 of block other"
        ):
            read_file(path, ANY)
        with pytest.raises(ReportedError, match="nothing fits"):
            read_file(path, Selection(public_key="unknown"))


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportedError, match="cannot read"):
        read_file(tmp_path / "nothing", ANY)
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as database:
        database.execute("CREATE TABLE songs (title TEXT)")
    with pytest.raises(ReportedError, match="not a file of `proofserve receive`"):
        read_file(tmp_path / "other.sqlite", ANY)
