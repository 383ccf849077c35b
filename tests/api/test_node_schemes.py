"""A node that proves any scheme: which one a request gets, and what the answers say of it."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from api.support import GENERATE, JOB, ORDER, START, Server, changed, said, serving
from proofserve.protocol.codec import decode
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import ModelFacts
from proofserve.protocol.schemes import scheme
from proofserve.rounds.records import Workload
from rounds.doubles import computed
from support.fake_engine import TOY_ENGINE_INFO, TOY_FACTS
from support.pace import until

pytestmark = pytest.mark.anyio

ALL = ["artifact-v1", "artifact-v1-layers", "sketch-v1", "sketch-v2"]
SKETCH = changed({**JOB, "scheme": "sketch-v1", "wait": True}, "params.k_dim", 64)
DIGEST = TOY_FACTS.weights_digest


@pytest.fixture
async def any_scheme() -> AsyncIterator[Server]:
    async with serving(scheme=None) as made:
        yield made


@pytest.mark.parametrize(
    ("asked", "proved"),
    [({}, scheme("artifact-v1")), *(({"scheme": name}, scheme(name, k_dim=12)) for name in ALL)],
)
async def test_each_request_gets_the_scheme_that_it_names(
    any_scheme: Server, asked: dict[str, Any], proved: Any
) -> None:
    body = (await any_scheme.post(GENERATE, {**JOB, **asked, "wait": True})).json()
    batch = await computed(
        any_scheme.engine, *JOB["nonces"], work=Workload(proved, Block("block", 7), "key", 16)
    )
    vectors = [decode(each["vector_b64"], proved.width) for each in body["artifacts"]]
    np.testing.assert_allclose(vectors, batch.values, atol=1e-3)
    assert body["encoding"] == {"dtype": "f16", "k_dim": proved.width, "endian": "le"}


async def test_a_sketch_has_64_values_a_twin_unless_the_request_says_more(
    any_scheme: Server,
) -> None:
    params = {"model": "toy", "seq_len": 16}
    body = (await any_scheme.post(GENERATE, {**SKETCH, "params": params})).json()
    assert body["encoding"]["k_dim"] == 2 * 64
    # Not bounded by the hidden size, which is 64.
    wide = (await any_scheme.post(GENERATE, changed(SKETCH, "params.k_dim", 4096))).json()
    assert wide["encoding"]["k_dim"] == 2 * 4096


async def test_experts_that_no_block_can_choose_are_refused_before_a_round_starts() -> None:
    obstacle = "sketch-v2 cannot choose this model's experts: a kernel chooses"
    engine_info = replace(TOY_ENGINE_INFO, experts_obstacle=obstacle)
    async with serving(scheme=None, engine_info=engine_info) as server:
        for path, body in ((START, ORDER), (GENERATE, JOB)):
            refused = await server.post(path, {**body, "scheme": "sketch-v2"})
            assert refused.status_code == 409
            assert refused.json()["detail"]["deployed"] == {"experts": obstacle}
            assert (await server.post(path, {**body, "scheme": "sketch-v1"})).status_code == 200


async def test_a_sketch_depends_on_the_block_height(any_scheme: Server) -> None:
    one = (await any_scheme.post(GENERATE, SKETCH)).json()
    other = (await any_scheme.post(GENERATE, {**SKETCH, "block_height": 8})).json()
    assert one["artifacts"][0] != other["artifacts"][0]


async def test_a_round_shows_its_own_scheme(any_scheme: Server) -> None:
    order = {**ORDER, "scheme": "sketch-v1", "weights_digest": DIGEST}
    response = await any_scheme.post(START, changed(order, "params.k_dim", 32))
    assert response.status_code == 200
    await until(lambda: len(any_scheme.outbox.rows) >= 8)
    body = await any_scheme.status()
    assert body["scheme"] is None
    assert (body["config"]["scheme"], body["config"]["k_dim"]) == ("sketch-v1", 32)
    (row, *_) = (await any_scheme.get("/results")).json()["results"]
    assert len(decode(row["vector_b64"], 64)) == 64


async def test_versions_have_the_digest_of_the_weights(any_scheme: Server) -> None:
    assert (await any_scheme.get("/versions")).json()["weights_digest"] == DIGEST


@pytest.mark.parametrize("path", [START, GENERATE])
@pytest.mark.parametrize("name", ["distance-v1", "no-such-scheme"])
async def test_an_unknown_scheme_is_409_and_the_known_ones_are_named(
    any_scheme: Server, path: str, name: str
) -> None:
    response = await any_scheme.post(path, {**(JOB if path == GENERATE else ORDER), "scheme": name})
    assert response.status_code == 409
    assert response.json()["detail"] == {
        "error": "scheme mismatch",
        "requested": {"scheme": name},
        "deployed": {"scheme": ALL},
    }


async def test_a_node_of_one_scheme_refuses_the_others_and_proves_its_own_unasked() -> None:
    async with serving(scheme="sketch-v1") as server:
        unasked = {name: value for name, value in SKETCH.items() if name != "scheme"}
        body = (await server.post(GENERATE, unasked)).json()
        assert body["encoding"]["k_dim"] == 128
        response = await server.post(GENERATE, {**JOB, "scheme": "artifact-v1"})
        assert response.status_code == 409
        assert response.json()["detail"]["deployed"] == {"scheme": "sketch-v1"}


@pytest.mark.parametrize("path", [START, GENERATE])
async def test_another_checkpoint_than_the_served_one_is_409(any_scheme: Server, path: str) -> None:
    order = {**(JOB if path == GENERATE else ORDER), "weights_digest": "ab" * 32}
    response = await any_scheme.post(path, order)
    assert response.status_code == 409
    assert response.json()["detail"] == {
        "error": "weights_digest mismatch",
        "requested": {"weights_digest": "ab" * 32},
        "deployed": {"weights_digest": DIGEST},
    }


async def test_a_digest_that_the_node_does_not_know_is_409() -> None:
    async with serving(engine_info=replace(TOY_ENGINE_INFO, facts=ModelFacts(64))) as server:
        response = await server.post(START, {**ORDER, "weights_digest": DIGEST})
    assert response.status_code == 409
    assert response.json()["detail"]["deployed"] == {"weights_digest": None}


@pytest.mark.parametrize("digest", ["", "ab" * 31, "AB" * 32, "xy" * 32, 1, "ab" * 32 + "\n"])
async def test_a_digest_that_is_none_is_422(any_scheme: Server, digest: Any) -> None:
    response = await any_scheme.post(START, {**ORDER, "weights_digest": digest})
    assert response.status_code == 422
    assert "body.weights_digest: " in said(response)


@pytest.mark.parametrize(
    ("facts", "known"),
    [
        (replace(TOY_FACTS, tokens=None), {"weights_digest": DIGEST, "token_ids": 0}),
        (replace(TOY_FACTS, weights_digest=None), {"weights_digest": None, "token_ids": 200}),
    ],
    ids=["no tokens", "no digest"],
)
async def test_a_sketch_of_a_model_without_digest_or_tokens_is_409(
    facts: ModelFacts, known: dict[str, Any]
) -> None:
    info = replace(TOY_ENGINE_INFO, facts=facts)
    async with serving(scheme=None, engine_info=info) as server:
        response = await server.post(GENERATE, SKETCH)
        assert response.status_code == 409
        detail = response.json()["detail"]
        assert detail["requested"]["scheme"] == "sketch-v1"
        assert detail["deployed"] == known
        # The network's scheme needs neither.
        assert (await server.post(GENERATE, {**JOB, "wait": True})).status_code == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("params.k_dim", 4097), "params.k_dim: 4097 is outside 1..4096"),
        (("params.k_dim", 0), "body.params.k_dim: "),
        (("params.seq_len", 513), "params.seq_len: 513 exceeds the model's context of 512"),
        (("poc_stronger_rng", True), "poc_stronger_rng: sketch-v1 has no such option"),
    ],
)
async def test_what_a_sketch_cannot_have_is_422_and_named(
    any_scheme: Server, change: tuple[str, Any], message: str
) -> None:
    response = await any_scheme.post(GENERATE, changed(SKETCH, *change))
    assert response.status_code == 422
    assert message in said(response)
    assert any_scheme.engine.calls == []
