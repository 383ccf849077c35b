"""A round's parameters as JSON text, for a column."""

import json
from dataclasses import asdict

from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.schemes import from_wire
from proofserve.rounds.records import RoundSpec, Target, Workload


def dumps(spec: RoundSpec) -> str:
    """ASCII only: a block hash or key may hold what a database does not store."""
    work = spec.work
    return json.dumps(
        {
            "round_id": spec.round_id,
            "scheme": work.scheme.to_wire(),
            "block": asdict(work.block),
            "public_key": work.public_key,
            "seq_len": work.seq_len,
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
        work=Workload(
            scheme=from_wire(fields["scheme"]),
            block=Block(**fields["block"]),
            public_key=fields["public_key"],
            seq_len=fields["seq_len"],
        ),
        lane=None if lane is None else NonceLane(**lane),
        batch_size=fields["batch_size"],
        url=fields["url"],
        target=None if target is None else Target(**target),
        commits_roots=fields["commits_roots"],
    )


def about(block_hash: str, public_key: str) -> str:
    """By which rounds of one block and key are found."""
    return json.dumps([block_hash, public_key])
