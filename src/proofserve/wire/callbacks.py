"""Results and verdicts as JSON objects, in responses and in callbacks (protocol A.8, B.5, B.6)."""

from dataclasses import asdict
from math import isfinite
from typing import Any

from proofserve.rounds.records import CompletedJob, DistanceVerdict, Job, Outcome, Proofs
from proofserve.wire.paths import GENERATED, VALIDATED
from proofserve.wire.records import artifact_record, encoding_of


def outcome_body(job: Job, outcome: Outcome) -> dict[str, Any]:
    """Block and key, and the artifacts and their encoding or the verdict.

    ``failed`` is present only if a nonce has no artifact.
    """
    about: dict[str, Any] = {
        "block_hash": job.work.block.hash,
        "block_height": job.work.block.height,
        "public_key": job.work.public_key,
    }
    if not isinstance(outcome, Proofs):
        verdict = {**asdict(outcome), "mismatch_nonces": list(outcome.mismatch_nonces)}
        return about | verdict
    body = about | {
        "artifacts": [artifact_record(a.nonce, a.vector_b64) for a in outcome.artifacts],
        "encoding": encoding_of(job.work.scheme.width),
    }
    if outcome.failed:
        body["failed"] = [{"nonce": n, "error": text} for n, text in outcome.failed.items()]
    return body


def callback(about: CompletedJob | DistanceVerdict) -> tuple[str, dict[str, Any]]:
    """The path below the callback address, and the body."""
    if isinstance(about, DistanceVerdict):
        return VALIDATED, _verdict_body(about)
    job, outcome = about.job, about.outcome
    body = {"request_id": about.request_id, "node_id": job.node_id, **outcome_body(job, outcome)}
    return GENERATED if isinstance(outcome, Proofs) else VALIDATED, body


def _verdict_body(verdict: DistanceVerdict) -> dict[str, Any]:
    """The fields of A.8, and those that a reader needs to check the verdict.

    A claimed distance that is not finite is null, because JSON has no number for it.
    """
    claims, target = verdict.claims, verdict.target
    return {
        "nonces": list(claims.nonces),
        "computed_distances": list(verdict.computed),
        "received_distances": [d if isfinite(d) else None for d in claims.distances],
        "valid": list(verdict.valid),
        "fraud_detected": verdict.fraud_detected,
        "n_invalid": verdict.n_invalid,
        "probability_honest": verdict.probability_honest,
        "r_target": target.r_target,
        "fraud_threshold": target.fraud_threshold,
        "public_key": claims.public_key,
        "node_id": claims.node_id,
        "block_hash": claims.block.hash,
        "block_height": claims.block.height,
    }
