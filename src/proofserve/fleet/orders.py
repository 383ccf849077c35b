"""The bodies of the calls to a member, from the fleet's own records."""

from collections.abc import Mapping, Sequence
from typing import Any

from proofserve.fleet.members.member_status import MemberDeployment
from proofserve.protocol.nonces import NonceLane
from proofserve.rounds.records import RoundSpec, Workload

# A round or job that the caller numbers itself, and a node that only judges.
_WHOLE = NonceLane(0, 1)


def round_order(
    spec: RoundSpec, lane: NonceLane, deployed: MemberDeployment, url: str
) -> dict[str, Any]:
    """The body of ``/init/generate`` for the nonces of ``lane``, with callbacks to ``url``."""
    body = {**_work(spec.work), **_numbers(lane), "batch_size": spec.batch_size}
    if spec.target is not None:
        return {
            **body,
            **_distance(spec.work),
            "r_target": spec.target.r_target,
            "fraud_threshold": spec.target.fraud_threshold,
            "callback_url": url,
        }
    if spec.commits_roots:
        body["commit"] = "roots"
    return {**body, **_artifact(spec.work, deployed), "url": url}


def prove_order(
    work: Workload, nonces: Sequence[int], deployed: MemberDeployment
) -> dict[str, Any]:
    """The body of ``/generate`` that waits for the vectors of ``nonces``."""
    numbers = {"node_id": _WHOLE.node_id, "node_count": _WHOLE.node_count}
    listed = {"nonces": list(nonces), "wait": True}
    return {**_work(work), **numbers, **_artifact(work, deployed), **listed}


def judging_order(work: Workload) -> dict[str, Any]:
    """The body of ``/init`` for a distance round by which the member can recompute distances."""
    return {**_work(work), **_distance(work), "r_target": 1.0}


def judge_order(work: Workload, nonces: Sequence[int]) -> dict[str, Any]:
    """The body of ``/validate`` that recomputes ``nonces``; its claims do not matter."""
    listed = {"nonces": list(nonces), "dist": [0.0] * len(nonces)}
    return {**_work(work), **listed, "node_id": _WHOLE.node_id}


def _work(work: Workload) -> dict[str, Any]:
    block = work.block
    return {"block_hash": block.hash, "block_height": block.height, "public_key": work.public_key}


def _numbers(lane: NonceLane) -> dict[str, int]:
    return {
        "node_id": lane.node_id,
        "node_count": lane.node_count,
        "group_id": lane.group_id,
        "n_groups": lane.n_groups,
    }


def _artifact(work: Workload, deployed: MemberDeployment) -> dict[str, Any]:
    wire: Mapping[str, Any] = work.scheme.to_wire()
    body: dict[str, Any] = {
        "scheme": wire["name"],
        "params": {"model": deployed.models[0], "seq_len": work.seq_len, "k_dim": wire["k_dim"]},
    }
    if wire.get("stronger_rng"):
        body["poc_stronger_rng"] = True
    if deployed.weights_digest is not None:
        body["weights_digest"] = deployed.weights_digest
    return body


def _distance(work: Workload) -> dict[str, Any]:
    wire: Mapping[str, Any] = work.scheme.to_wire()
    return {
        "seq_len": work.seq_len,
        "use_sign_flips": wire["sign_flips"],
        "use_layer_hooks": wire["layer_hooks"],
    }
