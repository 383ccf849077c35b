"""Callbacks: bodies (protocol A.8, B.5, B.6), headers, and the signature of sender and time."""

import hashlib
import hmac
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from proofserve.rounds.records import CompletedJob, DistanceVerdict, Job, Outcome, Proofs
from proofserve.wire import GENERATED, VALIDATED
from proofserve.wire.records import artifact_record, encoding_of

KEY_HEADER = "Idempotency-Key"
SEQUENCE_HEADER = "X-Proofserve-Sequence"
TIMESTAMP_HEADER = "X-Proofserve-Timestamp"
SIGNATURE_HEADER = "X-Proofserve-Signature"
_VERSION = "v1"


def callback(about: CompletedJob | DistanceVerdict) -> tuple[str, dict[str, Any]]:
    """The path below the callback address, and the body."""
    if isinstance(about, DistanceVerdict):
        return VALIDATED, _verdict_body(about)
    job, outcome = about.job, about.outcome
    body = {"request_id": about.request_id, "node_id": job.node_id, **outcome_body(job, outcome)}
    return GENERATED if isinstance(outcome, Proofs) else VALIDATED, body


def _verdict_body(verdict: DistanceVerdict) -> dict[str, Any]:
    """The fields of A.8, and those to check the verdict by; null for a claim that is not finite."""
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


def outcome_body(job: Job, outcome: Outcome) -> dict[str, Any]:
    """Block, key, and artifacts or the verdict; ``failed`` only if a nonce has no artifact."""
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


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is signed together with the body. ``timestamp`` in whole seconds since the epoch.

    With them, a recorded body cannot be sent again to another endpoint or as another callback.
    """

    endpoint: str
    key: str
    sequence: int
    timestamp: int

    def sign(self, secret: bytes, body: bytes) -> str:
        """The signature header: HMAC-SHA-256 in hexadecimal. Other threads run meanwhile."""
        parts = (_VERSION, self.timestamp, self.endpoint, self.key, self.sequence)
        head = "".join(f"{part}\n" for part in parts).encode()
        mac = hmac.new(secret, head, hashlib.sha256)
        mac.update(body)
        return f"{_VERSION}={mac.hexdigest()}"

    def matches(self, secret: bytes, body: bytes, signature: str) -> bool:
        """Whether ``signature`` is of this envelope and ``body``, found in constant time."""
        return hmac.compare_digest(self.sign(secret, body).encode(), signature.encode())
