"""Replays of the distance protocol's files, its superseded steps included."""

import hashlib
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from proofserve.protocol.draws import as_ordered, hash_keys, seed_bits, unit_vectors
from proofserve.protocol.errors import IncompleteRecomputation, ProtocolError
from proofserve.protocol.identity import Block, Challenge, seed
from proofserve.protocol.network_schemes import (
    DistanceScheme,
    is_winner,
    normalise,
    projection,
    rotate,
    sign_flips,
    target,
)
from proofserve.protocol.scheme import ModelFacts
from proofserve.protocol.verdict.comparison import compare_distances
from proofserve.protocol.verdict.counting import judge_distances

from .cases import DEVICE, Case, assert_close, tensor


def replay_signs(case: Case) -> None:
    challenge = Challenge(case.args["block_hash"], case.args["public_key"])
    seeds = [seed(challenge.sign_string(nonce)) for nonce in case.args["nonces"]]
    signs = sign_flips(seeds, case.args["dim"], DEVICE)
    assert signs.abs().eq(1).all()
    text = ["".join("+" if s > 0 else "-" for s in row) for row in signs.tolist()]
    assert text == case.expect["signs"]


def replay_target(case: Case) -> None:
    block_hash, public_key, dim = (case.args[key] for key in ("block_hash", "public_key", "dim"))
    if public_key is None:
        vector = target(block_hash, dim, DEVICE)
    else:
        # The later target with the key in its name belongs to no scheme of ours.
        vector = unit_vectors([seed(f"{block_hash}_{public_key}_target")], dim, DEVICE)[0]
    assert_close(vector[:8], case.expect["head8"], 2e-6)
    assert_close(vector[-4:], case.expect["tail4"], 2e-6)
    assert_close(vector.double().sum(), case.expect["sum_f64"], 2e-6 * dim)
    assert_close(vector.double().norm(), case.expect["norm_f64"], 2e-6)


def replay_projection(case: Case) -> None:
    args, expect = case.args, case.expect
    matrix = projection(args["block_hash"], args["output_dim"], args["hidden_size"], DEVICE)
    assert list(matrix.shape) == expect["shape"]
    assert_close(matrix[0, :4], expect["row0_head4"], 1e-7)
    assert_close(matrix[0, -4:], expect["row0_tail4"], 1e-7)
    assert_close(matrix[-1, :4], expect["last_row_head4"], 1e-7)
    assert_close(matrix[-1, -4:], expect["last_row_tail4"], 1e-7)
    sum_tolerance = 2e-8 * matrix.numel()
    assert_close(matrix.double().sum(), expect["sum_f64"], sum_tolerance)
    assert_close(matrix.double().norm(), expect["frobenius_f64"], sum_tolerance)


def replay_pipeline_a(case: Case) -> None:
    args, expect = case.args, case.expect
    hidden = tensor(args["last_hidden"])
    scheme = DistanceScheme(sign_flips=args["use_sign_flips"])
    block = scheme.for_block(Block(args["block_hash"], 7), ModelFacts(args["hidden_size"]), DEVICE)
    distances = block.finish(args["public_key"], args["nonces"], hidden).squeeze(1)
    assert_close(distances, expect["distances"], 5e-6)
    assert [is_winner(d, args["r_target"]) for d in distances.tolist()] == expect["valid"]
    unit, reflected = _pipeline_a_steps(case, hidden)
    logits = reflected @ block.projection.T
    assert_close(unit[:, :6], expect["unit_head6"], 5e-6)
    assert_close(reflected[:, :6], expect["reflected_head6"], 5e-6)
    assert_close(logits[:, :4], expect["logits_head4"], 5e-6)
    assert_close(logits.norm(dim=1), expect["logits_norm"], 5e-6)


def _pipeline_a_steps(case: Case, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The normalised and the reflected hidden states, from the primitives."""
    args = case.args
    challenge = Challenge(args["block_hash"], args["public_key"])
    nonces, dim = args["nonces"], args["hidden_size"]
    if args["use_sign_flips"]:
        hidden = hidden * sign_flips([seed(challenge.sign_string(n)) for n in nonces], dim, DEVICE)
    unit = normalise(hidden)
    steps = [
        unit_vectors([seed(challenge.reflection_string(n, r)) for n in nonces], dim, DEVICE)
        for r in range(args["num_reflections"])
    ]
    return unit, rotate(unit, torch.stack(steps, dim=1))


def replay_batches_a(case: Case) -> None:
    kinds: dict[str, Callable[[Case], None]] = {
        "ValidatedBatch": _replay_validated_batch,
        "ProofBatch.sub_batch": _replay_sub_batch,
        "PoCManager.validate": _replay_manager_validate,
    }
    kinds[case.args["kind"]](case)


def _replay_validated_batch(case: Case) -> None:
    args, expect = case.args, case.expect
    nonces = args["nonces"]
    computed, received = ([float(d) for d in args[key]] for key in ("dist", "received_dist"))
    claim = computed, received, args["r_target"]
    if not len(nonces) == len(computed) == len(received):
        # The peer zips to the shorter list; nothing is skipped here (P.2.1).
        with pytest.raises(ProtocolError):
            compare_distances(nonces, *claim)
        return
    if not all(map(math.isfinite, computed)):
        # To the peer a NaN of its own is a valid distance; to us it is no verdict at all (P.2.2).
        with pytest.raises(IncompleteRecomputation):
            compare_distances(nonces, *claim)
        return
    if len(set(nonces)) < len(nonces):
        # The peer counts a repeated nonce twice; P.2.6 refuses it. The rule itself does not look
        # at the nonces, so distinct ones show that it decides alike.
        with pytest.raises(ProtocolError, match="twice"):
            compare_distances(nonces, *claim)
        nonces = range(len(nonces))
    comparison = compare_distances(nonces, *claim)
    # Received NaN and -inf pass the peer's comparisons; here they are invalid (P.2.2).
    passed_over = sum(math.isnan(d) or d == -math.inf for d in received)
    if passed_over:
        assert comparison.n_mismatch >= max(passed_over, expect["n_invalid"])
        return
    verdict = judge_distances(comparison.n_mismatch, comparison.n_total, args["fraud_threshold"])
    assert comparison.n_mismatch == expect["n_invalid"]
    assert verdict.p_value == pytest.approx(expect["probability_honest"], rel=1e-9, abs=0)
    assert verdict.fraud_detected is expect["fraud_detected"]


def _replay_sub_batch(case: Case) -> None:
    args = case.args
    pairs = zip(args["nonces"], args["dist"], strict=True)
    winners = [(nonce, d) for nonce, d in pairs if is_winner(d, args["r_target"])]
    assert [nonce for nonce, _ in winners] == case.expect["nonces"]
    assert [distance for _, distance in winners] == case.expect["dist"]
    assert len(winners) == case.expect["length"]


def _replay_manager_validate(case: Case) -> None:
    """The winners are the peer's; its one-pair fraud rule is replaced by ValidatedBatch (P.2.2)."""
    nonces, received, computed, r_target = (
        case.args[key] for key in ("nonces", "received", "computed", "r_target")
    )
    valid = [is_winner(distance, r_target) for distance in computed]
    assert valid == case.expect["valid"]
    assert len(valid) == case.expect["total_checked"]
    assert sum(valid) == case.expect["total_valid"]
    if received is None:
        return
    if len(received) != len(nonces):
        # The peer skips its check and calls this honest; nothing is skipped here (P.2.1).
        with pytest.raises(ProtocolError, match="received"):
            compare_distances(nonces, computed, received, r_target)
        return
    comparison = compare_distances(nonces, computed, received, r_target)
    assert list(comparison.mismatch_nonces) == _invalid(nonces, computed, received, r_target)


def _invalid(
    nonces: Sequence[int], computed: Sequence[float], received: Sequence[float], r_target: float
) -> list[int]:
    """ValidatedBatch's rule as A.4 words it."""
    pairs = zip(nonces, computed, received, strict=True)
    return [n for n, ours, theirs in pairs if theirs >= r_target or ours > r_target]


def replay_permutations(case: Case) -> None:
    perms = _permutations(case, case.args["vocab_size"])
    for perm, expect in zip(perms, case.expect["per_nonce"], strict=True):
        indices = perm.tolist()
        raw = perm.cpu().numpy().astype("<i8").tobytes()
        assert indices == expect.get("perm", indices)
        assert indices[:16] == expect.get("first16", indices[:16])
        assert indices[-4:] == expect.get("last4", indices[-4:])
        assert hashlib.sha256(raw).hexdigest() == expect["sha256_i64le"]


def replay_permuted_distance(case: Case) -> None:
    size = case.args["vocab_size"]
    logits = tensor(case.args["logits"]).gather(1, _permutations(case, size))
    unit = logits / logits.norm(dim=1, keepdim=True)
    distances = (unit - target(case.args["block_hash"], size, DEVICE)).norm(dim=1)
    assert_close(distances, case.expect["distances"], 2e-6)


def _permutations(case: Case, size: int) -> Tensor:
    """The superseded step A0: indices by ascending hash, int64 [b, size]."""
    prefix = f"{case.args['block_hash']}_{case.args['public_key']}_nonce_"
    seeds = [seed(f"{prefix}{nonce}_permutations") for nonce in case.args["nonces"]]
    keys = torch.arange(size, dtype=torch.int32, device=DEVICE)
    return as_ordered(hash_keys(seed_bits(seeds, DEVICE), keys)).argsort(dim=1)


REPLAYS: dict[str, Callable[[Case], None]] = {
    "signs.json": replay_signs,
    "target.json": replay_target,
    "projection.json": replay_projection,
    "pipeline_a.json": replay_pipeline_a,
    "batches_a.json": replay_batches_a,
    "permutations.json": replay_permutations,
    "permuted_distance.json": replay_permuted_distance,
}
