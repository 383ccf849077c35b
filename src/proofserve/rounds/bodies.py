"""How an outcome is written in answers and callbacks alike (protocol B.5, B.6)."""

from dataclasses import asdict
from math import isfinite
from typing import Any

from proofserve.rounds.records import DistanceVerdict, Job, Outcome, Proofs, Workload


def encoding_of(work: Workload) -> dict[str, Any]:
    """How a reader decodes the vectors."""
    return {"dtype": "f16", "k_dim": work.scheme.width, "endian": "le"}


def outcome_body(job: Job, outcome: Outcome) -> dict[str, Any]:
    """The artifacts and their encoding, or the verdict.

    ``failed`` is there only if a nonce has no artifact: what networks know stays as it is, and
    what went wrong is still said.
    """
    if not isinstance(outcome, Proofs):
        return {**asdict(outcome), "mismatch_nonces": list(outcome.mismatch_nonces)}
    body: dict[str, Any] = {
        "artifacts": [{"nonce": a.nonce, "vector_b64": a.vector_b64} for a in outcome.artifacts],
        "encoding": encoding_of(job.work),
    }
    if outcome.failed:
        body["failed"] = [{"nonce": n, "error": text} for n, text in outcome.failed.items()]
    return body


def callback(request_id: str, job: Job, outcome: Outcome) -> tuple[str, dict[str, Any]]:
    """Where below the job's URL a completion goes, and its body."""
    endpoint = "generated" if isinstance(outcome, Proofs) else "validated"
    body = {
        "request_id": request_id,
        "block_hash": job.work.block_hash,
        "block_height": job.block_height,
        "public_key": job.work.public_key,
        "node_id": job.node_id,
        **outcome_body(job, outcome),
    }
    return endpoint, body


def verdict_callback(verdict: DistanceVerdict) -> dict[str, Any]:
    """The body of ``/validated`` in the distance protocol (A.8), and what the verdict rests on.

    A claimed distance that is not finite is null: JSON has no word for it.
    """
    claims = verdict.claims
    return {
        "nonces": list(claims.nonces),
        "computed_distances": list(verdict.computed),
        "received_distances": [d if isfinite(d) else None for d in claims.distances],
        "valid": list(verdict.valid),
        "fraud_detected": verdict.fraud_detected,
        "n_invalid": verdict.n_invalid,
        "probability_honest": verdict.probability_honest,
        "public_key": claims.public_key,
        "block_hash": claims.block_hash,
        "block_height": claims.block_height,
    }
