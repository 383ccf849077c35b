"""Jobs of /generate and their outcomes as JSON text, for columns."""

import json
from dataclasses import asdict
from typing import Any

from proofserve.fleet.sql.spec_json import work_fields, work_of
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.records import Artifact, Job, Outcome, Proofs, StatTest, Validation, Verdict


def job_text(job: Job) -> str:
    """ASCII only, as ``spec_json.dumps``."""
    return json.dumps(
        {
            "work": work_fields(job.work),
            "nonces": job.nonces,
            "batch_size": job.batch_size,
            "node_id": job.node_id,
            "url": job.url,
            "validation": None if job.validation is None else _claimed(job.validation),
        }
    )


def read_job(text: str) -> Job:
    """What ``job_text`` wrote."""
    fields = json.loads(text)
    validation = fields["validation"]
    return Job(
        work=work_of(fields["work"]),
        nonces=tuple(fields["nonces"]),
        batch_size=fields["batch_size"],
        node_id=fields["node_id"],
        url=fields["url"],
        validation=None if validation is None else _validation(validation),
    )


def outcome_text(outcome: Outcome) -> str:
    if isinstance(outcome, Verdict):
        return json.dumps({"verdict": asdict(outcome)})
    artifacts = [(each.nonce, each.vector_b64) for each in outcome.artifacts]
    return json.dumps({"artifacts": artifacts, "failed": list(outcome.failed.items())})


def read_outcome(text: str) -> Outcome:
    """What ``outcome_text`` wrote."""
    fields = json.loads(text)
    if (verdict := fields.get("verdict")) is not None:
        return Verdict(**{**verdict, "mismatch_nonces": tuple(verdict["mismatch_nonces"])})
    return Proofs(tuple(Artifact(*each) for each in fields["artifacts"]), dict(fields["failed"]))


def _claimed(validation: Validation) -> dict[str, Any]:
    return {
        "claims": [(each.nonce, each.vector_b64) for each in validation.claims],
        "test": asdict(validation.test),
    }


def _validation(fields: dict[str, Any]) -> Validation:
    claims = tuple(Claim(*each) for each in fields["claims"])
    return Validation(claims, StatTest(**fields["test"]))
