"""Replays of the artifact protocol's files."""

import base64
import binascii
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from proofserve.protocol.codec import encode, to_float16
from proofserve.protocol.draws import hash_keys, seed_bits
from proofserve.protocol.errors import IncompleteRecomputation, ProtocolError
from proofserve.protocol.identity import Block, Challenge, seed
from proofserve.protocol.network_schemes import (
    ArtifactScheme,
    normalise,
    pick,
    pick_by_score,
    rotate,
    rotation_steps,
)
from proofserve.protocol.scheme import ModelFacts
from proofserve.protocol.verdict.comparison import Claim, compare
from proofserve.protocol.verdict.counting import judge

from .cases import DEVICE, Case, assert_close, assert_f16_close, tensor


def challenge_of(case: Case) -> Challenge:
    return Challenge(case.args["block_hash"], case.args["public_key"])


def finish_by_score(case: Case, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and vectors in score order, which no scheme of ours uses, from the primitives."""
    challenge, nonces, k = challenge_of(case), case.args["nonces"], case.args["k_dim"]
    seeds = [seed(challenge.pick_string(nonce, k)) for nonce in nonces]
    indices = pick_by_score(seeds, hidden.shape[1], k, DEVICE)
    steps = rotation_steps(challenge, nonces, k, DEVICE)
    return indices, normalise(rotate(normalise(hidden).gather(1, indices), steps))


def replay_pick(case: Case) -> None:
    challenge, nonces = challenge_of(case), case.args["nonces"]
    dim, k = case.args["dim"], case.args["k"]
    seeds = [seed(challenge.pick_string(nonce, k)) for nonce in nonces]
    by_score = pick_by_score(seeds, dim, k, DEVICE)
    in_cuda_order = pick(seeds, dim, k, DEVICE).tolist()
    keys = torch.arange(dim, dtype=torch.int32, device=DEVICE)
    hashes = hash_keys(seed_bits(seeds, DEVICE), keys).gather(1, by_score)
    scores = hashes.cpu().numpy().view(np.uint32).tolist()
    for row, expect in enumerate(case.expect["per_nonce"]):
        assert by_score[row].tolist() == expect["order_score"]
        assert in_cuda_order[row] == expect["order_cuda"]
        assert sorted(in_cuda_order[row]) == expect["set_sorted"]
        assert scores[row] == expect["scores_of_order_score"]


def replay_haar(case: Case) -> None:
    x = tensor(case.args["x"])
    steps = rotation_steps(challenge_of(case), case.args["nonces"], x.shape[1], DEVICE)
    assert_close(rotate(x, steps), case.expect["y"], 5e-6)
    if case.expect["v_step0"]:
        assert_close(steps[:, 0], case.expect["v_step0"], 5e-6)
    else:
        assert steps.shape[1] == 0


def replay_pipeline_b(case: Case) -> None:
    args, per_order = case.args, case.expect["per_order"]
    challenge, nonces, k = challenge_of(case), args["nonces"], args["k_dim"]
    hidden = tensor(args["last_hidden"])
    block = ArtifactScheme(k_dim=k).for_block(
        Block(args["block_hash"], 7), ModelFacts(args["hidden_size"]), DEVICE
    )
    cuda = block.finish(args["public_key"], nonces, hidden)
    seeds = [seed(challenge.pick_string(nonce, k)) for nonce in nonces]
    cuda_indices = pick(seeds, args["hidden_size"], k, DEVICE)
    score_indices, score = finish_by_score(case, hidden)
    # A hidden state that is not finite gives a row of NaN, which engines report. The older branch
    # sends such a row, the newer one drops it if it has a NaN.
    usable = hidden.isfinite().all(dim=1)
    assert cuda[~usable].isnan().all()
    broken = {nonce for nonce, good in zip(nonces, usable.tolist(), strict=True) if not good}
    assert set(nonces) - broken == set(case.expect["kept_nonces_qd"]) - broken
    unit = normalise(hidden)
    for expect, indices, y in (
        (per_order["cuda"], cuda_indices, cuda),
        (per_order["score"], score_indices, score),
    ):
        assert indices.tolist() == expect["indices"]
        assert_close(unit.gather(1, indices), expect["xk"], 5e-6)
        assert_wire(y, expect, usable)


def assert_wire(y: Tensor, expect: dict[str, Any], usable: Tensor) -> None:
    """The usable rows of ``y``, their float16 form, and their texts where that form is equal."""
    rows = usable.cpu().numpy()
    assert_close(y[usable], tensor(expect["y"])[usable], 5e-6)
    words = np.array([[int(word, 16) for word in row] for row in expect["f16_hex"]], dtype="<u2")
    wanted = words.view("<f2")[rows]
    ours = y[usable].cpu().numpy()
    assert_f16_close(to_float16(ours), wanted)
    same = (to_float16(ours).view("<u2") == words[rows]).all(axis=1)
    texts = np.array(expect["vector_b64"])[rows]
    assert np.array(encode(ours))[same].tolist() == texts[same].tolist()


def replay_validation_b(case: Case) -> None:
    """The newer branch's decisions, except where it passes over what P.2.1 does not allow."""
    args = case.args
    computed = {item["nonce"]: _floats(item["vector_b64"]) for item in args["computed"]}
    claims = [Claim(item["nonce"], item["vector_b64"]) for item in args["received"]]
    nonces = [*computed, *range(len(computed), args["n_total"])]
    rule = args["dist_threshold"], args["k_dim"]
    if len(nonces) > len(computed):
        # The peer judges although it computed fewer nonces than it was asked for.
        with pytest.raises(IncompleteRecomputation):
            compare(nonces, computed, claims, *rule)
        return
    if not {claim.nonce for claim in claims} <= computed.keys():
        # The peer ignores claims about nonces that were not requested.
        with pytest.raises(ProtocolError, match="claims"):
            compare(nonces, computed, claims, *rule)
        return
    comparison = compare(nonces, computed, claims, *rule)
    # The peer skips a nonce without a claim or with an empty one, drops stray characters, lets
    # the last of several claims count, and fails on an odd number of bytes. All are mismatches.
    refused = {nonce for nonce in nonces if not _has_one_proper_claim(nonce, claims, args["k_dim"])}
    expected = case.expect["qd"]
    peers_mismatches = set(expected.get("mismatch_nonces", ()))
    assert set(comparison.mismatch_nonces) == peers_mismatches | refused
    assert comparison.n_total == args["n_total"]
    verdict = judge(
        comparison.n_mismatch, comparison.n_total, args["p_mismatch"], args["fraud_threshold"]
    )
    if "error" not in expected and refused <= peers_mismatches:
        assert comparison.n_mismatch == expected["n_mismatch"]
        assert verdict.p_value == pytest.approx(expected["p_value"], rel=1e-9, abs=0)
        assert verdict.fraud_detected is expected["fraud_detected"]


def _floats(text: str) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(text), dtype="<f2").astype(np.float32)


def _has_one_proper_claim(nonce: int, claims: list[Claim], k_dim: int) -> bool:
    """Whether exactly one claim names the nonce, and its text is canonical base64 of its length."""
    texts = [claim.vector_b64 for claim in claims if claim.nonce == nonce]
    if len(texts) != 1:
        return False
    try:
        raw = base64.b64decode(texts[0])
    except binascii.Error:
        return False
    return len(raw) == 2 * k_dim and base64.b64encode(raw).decode() == texts[0]


REPLAYS: dict[str, Callable[[Case], None]] = {
    "pick.json": replay_pick,
    "haar.json": replay_haar,
    "pipeline_b.json": replay_pipeline_b,
    "validation_b.json": replay_validation_b,
}
