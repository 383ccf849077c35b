"""``verify`` knows which nonces were owed: chosen ones clear nobody, and gaps are said."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.protocol.verdict.comparison import Claim
from proofserve.receiver.callbacks import Generated
from proofserve.receiver.store import ReceiverStore
from proofserve.remote.http import wait_until
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve_lab.checkpoints import claims_of_model
from proofserve_lab.nodes import status_of
from support.models import TINY_THRESHOLD
from support.replayed import replayed
from support.stub_node import Habits, StubNode, stub_node

WORK = Work("tiny", seq_len=32)
ALL = ("--lane", "0:1")


def verify(source: str | Path, tiny: Path, *options: str) -> Result:
    close = ("--model", str(tiny), "--dist-threshold", TINY_THRESHOLD)
    return CliRunner().invoke(app, ["verify", str(source), *close, "--seq-len", "32", *options])


@pytest.fixture(scope="module")
def from_store(tiny: Path) -> list[Claim]:
    """As many chosen nonces as would clear a node."""
    return replayed(tiny, 16, WORK.seq_len)


@pytest.fixture(scope="module")
def honest(tiny: Path) -> list[Claim]:
    return claims_of_model(tiny, WORK, range(24))


def body_of(claims: list[Claim]) -> dict[str, Any]:
    return {
        "block_hash": WORK.block_hash,
        "block_height": WORK.block_height,
        "public_key": WORK.public_key,
        "node_id": 0,
        "artifacts": [{"nonce": c.nonce, "vector_b64": c.vector_b64} for c in claims],
        "encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"},
    }


def a_file(folder: Path, claims: list[Claim], **more: int) -> Path:
    path = folder / f"{len(claims)}-artifacts.json"
    path.write_text(json.dumps(body_of(claims) | more))
    return path


def a_receiver(folder: Path, callbacks: list[list[Claim]], numbers: list[int | None]) -> Path:
    """The file of a receiver of one callback after the other, under these sequence numbers."""
    path = folder / "received.sqlite"
    with closing(ReceiverStore.open(path)) as store:
        for claims, number in zip(callbacks, numbers, strict=True):
            store.add_generated(Generated.model_validate(body_of(claims)), f"k{number}", number)
    return path


def list_instead(node: StubNode, claims: list[Claim]) -> None:
    """Make the ended round of a node list other claims than it computed."""
    row = {"round_id": str(node.rounds)}
    node.rows = [
        {**row, "seq": place + 1, "nonce": each.nonce, "vector_b64": each.vector_b64}
        for place, each in enumerate(claims)
    ]


def a_round(url: str) -> None:
    with NodeClient(url) as node, node.round(WORK):
        wait_until(lambda: status_of(node).processed > 0, "a result", 30)


def require_not_cleared(result: Result) -> None:
    assert result.exit_code == 2, result.output
    said = "artifact-v1 is cleared only where the lane is known"
    assert said in result.output.replace("\n", " ")
    assert "give --lane FIRST:STEP" in result.output.replace("\n", " ")


def test_vectors_from_a_store_clear_nobody_from_a_file(
    tiny: Path, from_store: list[Claim], tmp_path: Path
) -> None:
    source = a_file(tmp_path, from_store)
    unknown = verify(source, tiny)
    require_not_cleared(unknown)
    # Each of them is right: without the lane this was an honest node.
    assert "count     honest: 0 mismatches" in unknown.output
    known = verify(source, tiny, *ALL)
    assert known.exit_code == 1, known.output
    owed = max(claim.nonce for claim in from_store) + 1
    assert f"{owed - 16} nonces of the lane are left out" in known.output
    assert "left out\n" in known.output


def test_vectors_from_a_store_clear_nobody_from_a_receiver(
    tiny: Path, from_store: list[Claim], tmp_path: Path
) -> None:
    source = a_receiver(tmp_path, [from_store], [1])
    require_not_cleared(verify(source, tiny))
    known = verify(source, tiny, *ALL)
    assert known.exit_code == 1, known.output
    assert "are left out, below the last claim" in known.output


def test_vectors_from_a_store_clear_nobody_from_a_node(tiny: Path, from_store: list[Claim]) -> None:
    with stub_node() as (node, url):
        a_round(url)
        list_instead(node, from_store)
        # It says its lane, and that this is all of its round.
        caught = verify(url, tiny, "--block-height", "1")
        assert caught.exit_code == 1, caught.output
        assert "are left out, below the last claim" in caught.output
        # It may say that it has deleted what it delivered, as nodes do.
        node.habits = Habits(counts_right=False)
        require_not_cleared(verify(url, tiny, "--block-height", "1"))
        owed = verify(url, tiny, "--block-height", "1", *ALL)
        assert owed.exit_code == 2, owed.output
        assert owed.output.startswith("unproved") or "\nunproved\n" in owed.output
        assert "the node lists 1 results fewer than its round has" in owed.output


def test_equal_bits_of_chosen_nonces_clear_nobody(tmp_path: Path) -> None:
    """A reused vector is the one that the trusted engine computes, bit by bit."""
    with stub_node() as (_, url), NodeClient(url) as node:
        source = a_file(tmp_path, node.artifacts(Work("stub", seq_len=32), range(100, 120)))
        options = ("verify", str(source), "--recompute-url", url, "--seq-len", "32")
        result = CliRunner().invoke(app, [*options])
        known = CliRunner().invoke(app, [*options, "--lane", "0:1"])
    require_not_cleared(result)
    assert "exact     honest: equal bits in 20 of 20 nonces" in result.output
    # The others judge only where bits differ.
    assert "Other bits decide nothing" not in result.output
    assert known.exit_code == 2, known.output
    assert "100 nonces of the lane are left out" in known.output


def test_an_honest_node_of_a_known_lane_is_cleared(
    tiny: Path, honest: list[Claim], tmp_path: Path
) -> None:
    for source, options in (
        (a_file(tmp_path, honest), ALL),
        # A callback in the middle of a round: what it names is owed from its first nonce on.
        (a_file(tmp_path, honest[7:], node_count=1), ()),
        (a_receiver(tmp_path, [honest[:12], honest[12:]], [3, 9]), ALL),
    ):
        result = verify(source, tiny, *options)
        assert result.exit_code == 0, result.output
        assert "left out" not in result.output
    with stub_node() as (node, url):
        a_round(url)
        list_instead(node, honest)
        result = verify(url, tiny)
    assert result.exit_code == 0, result.output


def test_what_may_be_lost_on_the_way_is_unproved_and_no_gap(
    tiny: Path, honest: list[Claim], tmp_path: Path
) -> None:
    record = tmp_path / "verdict.json"
    source = a_receiver(tmp_path, [honest[:8], honest[12:]], [3, 5])
    lost = verify(source, tiny, *ALL, "--json", str(record))
    assert lost.exit_code == 2, lost.output
    said = json.loads(record.read_text())
    assert (said["verdict"], said["nonces_left_out"]) == ("unproved", 0)
    assert said["findings"][-1]["figures"] == {"reason": "not delivered"}
    assert "4 nonces of the lane, below others that came" in lost.output
    source.unlink()
    # Here nothing can be lost between the two.
    source = a_receiver(tmp_path, [honest[:8], honest[12:]], [3, 4])
    known = verify(source, tiny, *ALL, "--fixed", "--json", str(record))
    reasons = [each["reason"] for each in json.loads(record.read_text())["mismatches"]]
    assert (known.exit_code, reasons) == (1, ["left out"] * 4), known.output
    assert "4 nonces of the lane are left out" in known.output


def test_a_list_of_another_lane_is_an_error_of_the_call(
    tiny: Path, honest: list[Claim], tmp_path: Path
) -> None:
    source = a_file(tmp_path, honest)
    for lane, said in (
        ("0:2", "nonce 1 of the source is of another lane"),
        ("2:2", "give FIRST:STEP with FIRST below STEP"),
        ("a:b", "give FIRST:STEP with FIRST below STEP"),
    ):
        refused = verify(source, tiny, "--lane", lane)
        assert refused.exit_code == 3, refused.output
        assert said in refused.output.replace("\n", " ")


def test_vectors_that_contradict_their_own_envelope_are_no_fraud(
    tiny: Path, honest: list[Claim], tmp_path: Path
) -> None:
    path, body = tmp_path / "artifacts.json", body_of(honest)
    path.write_text(json.dumps(body | {"encoding": {**body["encoding"], "k_dim": 128}}))
    result = verify(path, tiny, "--scheme", "sketch-v1")
    assert result.exit_code == 3, result.output
    said = "every vector of the source has 12 values, and its encoding says 128"
    assert said in result.output.replace("\n", " ")


def test_a_node_that_is_away_or_no_node_has_not_proved(tiny: Path, tmp_path: Path) -> None:
    record = tmp_path / "verdict.json"
    with stub_node(Habits(api_key="a key")) as (_, url):
        refused = verify(url, tiny, "--json", str(record))
    assert refused.exit_code == 2, refused.output
    assert "unproved" in refused.output
    assert json.loads(record.read_text())["reason"] == "refused"
    away = verify(url, tiny, "--json", str(record))
    assert (away.exit_code, json.loads(record.read_text())["reason"]) == (2, "not reached")
