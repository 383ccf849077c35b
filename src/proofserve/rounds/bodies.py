"""How an outcome is written in answers and callbacks alike (protocol B.5, B.6)."""

from dataclasses import asdict
from typing import Any

from proofserve.rounds.records import Job, Outcome, Proofs, Workload


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
