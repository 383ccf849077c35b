import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proofserve.client.judging import claimed_order
from proofserve.protocol.codec import encode
from proofserve.protocol.network_schemes import ArtifactScheme
from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.http import wait_until
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import DistanceWork, Work
from proofserve.reports import ReportedError
from proofserve.verifier.claims import (
    ClaimedArtifacts,
    Selection,
    from_file,
    from_node,
    kernel_facts,
)
from proofserve.verifier.orders import WorkOptions, order_of, require_width, workload_of
from proofserve_lab.nodes import status_of
from support.stub_node import stub_node

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


def written(folder: Path, body: object) -> Path:
    path = folder / "artifacts.json"
    path.write_text(json.dumps(body))
    return path


def test_a_callback_is_a_file_of_artifacts(tmp_path: Path) -> None:
    expected = ClaimedArtifacts("block", "key", (4, 2), CLAIMS, width=12, block_height=7)
    claimed = from_file(written(tmp_path, BODY), ANY)
    assert replace(claimed, unknown_lane=None) == expected
    assert "give --lane FIRST:STEP" in (claimed.unknown_lane or "")


def test_a_file_may_say_more(tmp_path: Path) -> None:
    more = {"nonces": [1, 2, 4, 4], "params": {"model": "m", "seq_len": 256, "k_dim": 12}}
    claimed = from_file(written(tmp_path, BODY | more), ANY)
    assert (claimed.nonces, claimed.claims, claimed.seq_len) == ((1, 2, 4), CLAIMS, 256)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda body: body.pop("block_hash"), "block_hash: Field required"),
        (lambda body: body["artifacts"][1].update(nonce=-1), r"artifacts\.1\.nonce"),
        (lambda body: body["artifacts"][0].update(nonce="4"), r"artifacts\.0\.nonce"),
        (lambda body: body["artifacts"].append("AAA="), r"artifacts\.2"),
        (lambda body: body["encoding"].update(dtype="f32"), r"encoding\.dtype"),
        (lambda body: body.update(nonces=[2**63]), r"nonces\.0"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], object], named: str
) -> None:
    body = json.loads(json.dumps(BODY))
    spoil(body)
    with pytest.raises(ReportedError, match=named):
        from_file(written(tmp_path, body), ANY)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda artifact: artifact.update(vector_b64=None),
        lambda artifact: artifact.update(vector_b64=[0.5, 0.5]),
        lambda artifact: artifact.pop("vector_b64"),
    ],
)
def test_an_artifact_without_a_text_is_an_empty_claim_among_the_others(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], object]
) -> None:
    body = json.loads(json.dumps(BODY))
    spoil(body["artifacts"][1])
    claimed = from_file(written(tmp_path, body), ANY)
    assert (claimed.nonces, claimed.claims) == ((4, 2), (Claim(4, "AAA="), Claim(2, "")))


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportedError, match="cannot read"):
        from_file(tmp_path / "nothing", ANY)
    (tmp_path / "text").write_text("Dear validator, ")
    with pytest.raises(ReportedError, match="not JSON"):
        from_file(tmp_path / "text", ANY)


def test_a_nodes_round_is_read() -> None:
    with stub_node() as (_, url), NodeClient(url) as node:
        with pytest.raises(ReportedError, match="has no round"):
            from_node(node, ANY)
        with node.round(Work("toy", block_hash="first")):
            wait_until(lambda: status_of(node).processed >= 32, "results", 30)
        with node.round(Work("toy", seq_len=64)):
            wait_until(lambda: status_of(node).processed >= 32, "results", 30)
            claimed = from_node(node, ANY)
        assert (claimed.block_hash, claimed.seq_len, claimed.width) == ("lab-block", 64, 12)
        assert claimed.nonces == tuple(range(len(claimed.nonces)))
        assert len(claimed.claims) == len(claimed.nonces) >= 32
        assert (
            claimed.claims[0].vector_b64
            == node.artifacts(Work("toy", seq_len=64), [0])[0].vector_b64
        )
        with (
            node.round(DistanceWork("toy")),
            pytest.raises(ReportedError, match="distance protocol"),
        ):
            from_node(node, ANY)


def claims(*texts: str) -> ClaimedArtifacts:
    """Of a source that says nothing of their shape."""
    made = tuple(Claim(nonce, text) for nonce, text in enumerate(texts))
    return ClaimedArtifacts("block", "key", tuple(range(len(made))), made)


def of(width: int) -> str:
    return encode(np.ones((1, width), np.float32))[0]


def test_the_shape_is_what_was_asked_for_then_what_the_source_says_then_the_default() -> None:
    silent, tokens = claims(), WorkOptions(seq_len=256)
    assert workload_of(order_of(silent, tokens)).scheme == ArtifactScheme(k_dim=12)
    sketches = replace(tokens, scheme="sketch-v1", block_height=7)
    assert workload_of(order_of(silent, sketches)).scheme.width == 128
    assert workload_of(order_of(silent, replace(tokens, k_dim=24))).scheme == ArtifactScheme(
        k_dim=24
    )
    said = replace(silent, scheme="sketch-v1", width=96, seq_len=64, block_height=7)
    assert (workload_of(order_of(said, WorkOptions())).scheme.width, said.seq_len) == (96, 64)


@pytest.mark.parametrize(
    ("source", "asked", "both"),
    [
        ({"scheme": "sketch-v1"}, {"scheme": "artifact-v1"}, "artifact-v1 .* says sketch-v1"),
        ({"width": 128}, {"k_dim": 12}, "--k-dim 12 contradicts the source, which says 128"),
        ({"width": 24}, {"k_dim": 12}, "12 contradicts the source, which says 24"),
        ({"width": 128}, {}, "scheme: the source says k_dim 128, artifact-v1 has 12"),
        ({"width": 25}, {"scheme": "sketch-v1"}, "k_dim: the source has 25 values per nonce"),
        ({"seq_len": 64}, {}, "256 contradicts the source, which says 64"),
        ({}, {"seq_len": None}, "the source does not say seq_len"),
    ],
)
def test_a_claim_of_another_shape_is_an_error_of_the_call(
    source: dict[str, Any], asked: dict[str, Any], both: str
) -> None:
    options = WorkOptions(**{"seq_len": 256, "block_height": 7, **asked})
    with pytest.raises(ReportedError, match=both):
        workload_of(order_of(replace(claims(of(12)), **source), options))


def test_a_source_is_of_another_width_only_as_a_whole() -> None:
    asked = Work("", k_dim=12, scheme="artifact-v1")
    with pytest.raises(ReportedError, match=r"every vector of the source has 128 values.* here 12"):
        require_width(claims(of(128), of(128)), asked)
    # These are mismatches, whatever the source says of itself.
    for garbage in (
        (of(128), of(12)),
        (of(128), of(64)),
        (of(128), "!"),
        ("", ""),
        (encode(np.full((1, 128), np.nan, np.float32))[0],),
        (),
    ):
        require_width(claims(*garbage), asked)
    with pytest.raises(
        ReportedError, match=r"every vector of the source has 24 .* encoding says 12"
    ):
        require_width(replace(claims(of(24), of(24)), width=12), asked)


def test_a_processor_is_known_by_its_name_and_its_instructions() -> None:
    said = {"vllm": "0.32.0", "processor": "a Xeon", "instructions": "AVX2", "ranks": "1"}
    facts = kernel_facts("a node", said)
    assert (facts["processor"], facts["ranks"]) == ("a Xeon, AVX2", 1)
    assert facts["name"] == "vLLM 0.32.0, a Xeon, AVX2, 1 ranks"
    assert kernel_facts("a node", {})["processor"] is None
    assert kernel_facts("a node", {"ranks": "two"})["ranks"] is None


def test_a_forgotten_scheme_convicts_nobody() -> None:
    """A receiver's file has no scheme: with --k-dim alone its sketches would all be mismatches."""
    sketches = replace(claims(of(128), of(128)), seq_len=256)
    forgot = WorkOptions(k_dim=64)
    with pytest.raises(ReportedError, match="give --scheme and --k-dim"):
        claimed_order(sketches, forgot, None, is_file=True)
    said = replace(forgot, scheme="artifact-v1")
    assert claimed_order(sketches, said, None, is_file=True).width == 64
