"""Replays of the files that both protocols share."""

import base64
import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from proofserve.protocol.codec import decode, encode
from proofserve.protocol.draws import hash_keys, normal, seed_bits, uniform, unit_vectors
from proofserve.protocol.errors import MalformedVector, ProtocolError
from proofserve.protocol.identity import Block, seed, words
from proofserve.protocol.network_schemes import ArtifactScheme, reflect
from proofserve.protocol.nonces import NonceLane, pad
from proofserve.protocol.scheme import ModelFacts
from proofserve.protocol.verdict.counting import judge

from .cases import DEVICE, Case, assert_close, bits, tensor

_INPUT_TOLERANCE = {"float32": 2e-6, "float16": 0.004, "bfloat16": 0.03125}
_INPUT_SUM_TOLERANCE = {"float32": 1e-6, "float16": 1e-5, "bfloat16": 1e-4}
_SHARE = {"node_id", "node_count", "group_id", "n_groups"}


def replay_seeds(case: Case) -> None:
    string = case.args["string"]
    assert seed(string) == case.expect["seed"]
    assert list(words(string)) == case.expect["sub_seeds8"]
    assert "".join(f"{word:08x}" for word in words(string)) == case.expect["sha256"]


def replay_murmur3(case: Case) -> None:
    keys = torch.tensor(case.args["keys"], dtype=torch.int32, device=DEVICE)
    hashes = hash_keys(seed_bits([case.args["seed"]], DEVICE), keys)[0]
    assert hashes.cpu().numpy().view(np.uint32).tolist() == case.expect["hashes"]


def replay_uniform(case: Case) -> None:
    values = uniform([case.args["seed"]], case.args["n"], DEVICE)[0]
    raw = values.cpu().numpy().astype("<f4").tobytes()
    assert bits(values[:16]) == case.expect["first16_hex"]
    assert bits(values[-4:]) == case.expect["last4_hex"]
    assert hashlib.sha256(raw).hexdigest() == case.expect["sha256_f32le"]
    assert bits(values.min().view(1)) == [case.expect["min_hex"]]
    assert bits(values.max().view(1)) == [case.expect["max_hex"]]
    assert int((values > 0.5).sum()) == case.expect["n_gt_half"]


def replay_normal(case: Case) -> None:
    n = case.args["n"]
    values = normal([case.args["seed"]], n, DEVICE)[0].double()
    assert_close(values[:16], case.expect["first16"], 2e-6)
    assert_close(values[-4:], case.expect["last4"], 2e-6)
    assert_close(values.sum(), case.expect["sum_f64"], 1e-6 * n)
    # A number x may be off by 2e-6, which changes its square by 4e-6 x.
    largest = values.abs().max().item()
    assert_close(values.square().sum(), case.expect["sumsq_f64"], max(1e-6 * n, 4e-6 * largest))


def replay_inputs(case: Case) -> None:
    args = case.args
    concat = args["variant"] == "concat"
    scheme = ArtifactScheme(k_dim=1, layer_reflections=concat, stronger_rng=concat)
    block = scheme.for_block(Block(args["block_hash"], 7), ModelFacts(args["dim"]), DEVICE)
    dtype = getattr(torch, args["dtype"])
    inputs = block.inputs(args["public_key"], args["nonces"], args["seq_len"], dtype)
    assert inputs.dtype == dtype
    assert list(inputs.shape) == case.expect["shape"]
    tolerance = _INPUT_TOLERANCE[args["dtype"]]
    sum_tolerance = _INPUT_SUM_TOLERANCE[args["dtype"]] * inputs[0].numel()
    for rows, expect in zip(inputs.double(), case.expect["per_nonce"], strict=True):
        assert_close(rows[0, :4], expect["first_row_head"], tolerance)
        assert_close(rows[0, -4:], expect["first_row_tail"], tolerance)
        assert_close(rows[-1, :4], expect["last_row_head"], tolerance)
        assert_close(rows[-1, -4:], expect["last_row_tail"], tolerance)
        assert_close(rows.sum(), expect["sum_f64"], sum_tolerance)
        assert_close(rows.abs().sum(), expect["sumabs_f64"], sum_tolerance)


def replay_householder_vector(case: Case) -> None:
    vector = unit_vectors([seed(case.args["seed_str"])], case.args["dim"], DEVICE)[0]
    assert_close(vector[:16], case.expect["head16"], 2e-6)
    assert_close(vector[-4:], case.expect["tail4"], 2e-6)
    assert_close(vector.double().norm(), case.expect["norm_f64"], 2e-6)


def replay_householder_apply(case: Case) -> None:
    dtype = getattr(torch, case.args["dtype"])
    tolerance = 0.0625 if dtype == torch.bfloat16 else 4e-6
    x = tensor(case.args["x"], dtype)
    v = unit_vectors([seed(case.args["seed_str"])], x.shape[-1], DEVICE)[0].to(dtype)
    assert_close(v, case.args["v"], tolerance)
    assert_close(reflect(x, v), case.expect["y"], tolerance)


def replay_codec(case: Case) -> None:
    if case.args["op"] == "encode":
        vector = np.array(case.args["vector"], dtype=np.float32).reshape(1, -1)
        (text,) = encode(vector)
        raw = np.frombuffer(base64.b64decode(text), dtype="<u2")
        assert text == case.expect["b64"]
        assert [f"{word:04x}" for word in raw.tolist()] == case.expect["f16_hex"]
        return
    text = case.args["b64"]
    peer = np.array(case.expect["peer"].get("vector", [0.0]), dtype=np.float32)
    # Stricter than the peer by P.2.1: where it raises, lets non-finite values through, or reads a
    # text that is not the one way of writing that vector (it drops stray characters), we refuse.
    proper = np.isfinite(peer).all() and encode(peer[None]) == [text]
    if "error" in case.expect["peer"] or not proper:
        with pytest.raises(MalformedVector, match="vector_b64"):
            decode(text, len(peer))
    else:
        np.testing.assert_array_equal(decode(text, len(peer)), peer, strict=True)


def replay_binomial(case: Case) -> None:
    verdict = judge(**case.args)
    assert verdict.p_value == pytest.approx(case.expect["p_value"], rel=1e-9, abs=0)
    assert verdict.fraud_detected is case.expect["fraud_detected"]


def replay_nonces(case: Case) -> None:
    share = {key: case.args[key] for key in _SHARE & case.args.keys()}
    if not _is_share(share):
        # The peer checks no range and repeats nonces; P.2.6 refuses.
        with pytest.raises(ProtocolError):
            NonceLane(**share)
        return
    lane = NonceLane(**share)
    size = case.args["batch_size"]
    batches = [list(lane.batch(i * size, size)) for i in range(case.args["batches"])]
    assert batches == case.expect["batches"]


def _is_share(share: dict[str, int]) -> bool:
    of_nodes = 0 <= share["node_id"] < share["node_count"]
    return of_nodes and 0 <= share.get("group_id", 0) < share.get("n_groups", 1)


def replay_padding(case: Case) -> None:
    nonces, size = case.args["nonces"], case.args["pad_to"]
    if min(nonces, default=0) < 0 or len(set(nonces)) < len(nonces):
        # The peer collides with its own dummies here; P.2.6 forbids these nonces.
        with pytest.raises(ProtocolError, match="nonces"):
            pad(nonces, size)
        return
    padded = pad(nonces, size)
    assert list(padded) == case.expect["padded"]
    assert [nonce for nonce in padded if nonce >= 0] == case.expect["after_filter"]


REPLAYS: dict[str, Callable[[Case], None]] = {
    "seeds.json": replay_seeds,
    "murmur3.json": replay_murmur3,
    "uniform.json": replay_uniform,
    "normal.json": replay_normal,
    "inputs.json": replay_inputs,
    "householder_vector.json": replay_householder_vector,
    "householder_apply.json": replay_householder_apply,
    "codec.json": replay_codec,
    "binomial.json": replay_binomial,
    "nonces.json": replay_nonces,
    "padding.json": replay_padding,
}
