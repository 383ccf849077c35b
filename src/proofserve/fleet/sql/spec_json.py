"""The parameters of rounds and proofs as JSON, for columns."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.schemes import from_wire
from proofserve.rounds.records import RoundSpec, Target, Workload


def dumps(spec: RoundSpec) -> str:
    """ASCII only: a block hash or key may hold what a database does not store."""
    return json.dumps(
        {
            "round_id": spec.round_id,
            **work_fields(spec.work),
            "lane": asdict(spec.lane) if spec.lane else None,
            "batch_size": spec.batch_size,
            "url": spec.url,
            "target": asdict(spec.target) if spec.target else None,
            "commits_roots": spec.commits_roots,
        }
    )


def loads(text: str) -> RoundSpec:
    """What ``dumps`` wrote."""
    fields = json.loads(text)
    lane, target = fields["lane"], fields["target"]
    return RoundSpec(
        round_id=fields["round_id"],
        work=work_of(fields),
        lane=None if lane is None else NonceLane(**lane),
        batch_size=fields["batch_size"],
        url=fields["url"],
        target=None if target is None else Target(**target),
        commits_roots=fields["commits_roots"],
    )


def work_fields(work: Workload) -> dict[str, Any]:
    return {
        "scheme": work.scheme.to_wire(),
        "block": asdict(work.block),
        "public_key": work.public_key,
        "seq_len": work.seq_len,
    }


def work_of(fields: Mapping[str, Any]) -> Workload:
    """What ``work_fields`` described."""
    return Workload(
        scheme=from_wire(fields["scheme"]),
        block=Block(**fields["block"]),
        public_key=fields["public_key"],
        seq_len=fields["seq_len"],
    )


def about(block_hash: str, public_key: str) -> str:
    """By which rounds of one block and key are found."""
    return json.dumps([block_hash, public_key])
