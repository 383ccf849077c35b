"""Vectors of real honest nodes as files: this machine's, and those that others recorded.

A folder has ``NAME-SCHEME.jsonl`` in the form of ``outbox export`` for each node and scheme, and a
README.md whose line "Processor: ..." says on what they ran.
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from measuring.files import ROOT
from measuring.nodes import artifacts
from proofserve.cli.servers import ServerOptions, serving
from proofserve.cli.session import CommandSession
from proofserve.protocol.scheme import Scheme
from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.records import vectors_of
from proofserve.reports import ReportedError
from soundness.subjects import BLOCK, FORWARD_BATCH, KEY, Subject
from soundness.trying import RealNode

# Of a processor that none of this was written on, recorded by somebody else.
FOREIGN: Final = ROOT / "tests" / "data" / "vectors-amd-zen3.json"
# Written last: a folder without it is not complete.
README: Final = "README.md"
# Nonces in one call, seconds of a small model.
AT_ONCE: Final = 8

_TEXT: Final = """\
# Honest vectors of a real node

{files}: its results (the form of `outbox export`), {nonces} nonces from 0.
Node: {model}, {node}, eager, forward batch {batch}.
Processor: {processor}.
Round: block_hash {block}, block_height {height}, public_key {key}, seq_len {seq_len}.

They are an examination: fit nothing to them. `make soundness EXAMINE=folder` judges them.
"""


def record(subject: Subject, name: str, ranks: int, folder: Path, session: CommandSession) -> None:
    """Start a server of ``subject``, and write what it proves, with what it runs on.

    Raises ServerFailed and NodeError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = subject.model
    options = ServerOptions(model.folder, model.name, FORWARD_BATCH, ranks=ranks)
    with serving(options, session) as node:
        said = node.kernels()
        for scheme in subject.schemes:
            order = subject.order(scheme)
            claims = artifacts(node, order, subject.judged, AT_ONCE, session.line)
            rows = [
                {"seq": seq, "round_id": "recorded", **asdict(claim)}
                for seq, claim in enumerate(claims, 1)
            ]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}-{scheme}.jsonl").write_text(lines)
    processor = said.pop("processor", "unknown")
    text = _TEXT.format(
        files=", ".join(f"`{name}-{scheme}.jsonl`" for scheme in subject.schemes),
        nonces=subject.nonces,
        model=model.name,
        node=", ".join(f"{field} {value}" for field, value in said.items()),
        batch=FORWARD_BATCH,
        processor=processor,
        block=BLOCK.hash,
        height=BLOCK.height,
        key=KEY,
        seq_len=subject.seq_len,
    )
    (folder / README).write_text(text)


def nodes_in(folder: Path, scheme: Scheme) -> Iterator[RealNode]:
    """Raises ReportedError for a folder that is none of ours."""
    try:
        lines = (folder / README).read_text().splitlines()
    except OSError as error:
        raise ReportedError(f"{folder} has no {README} that says what its node ran on") from error
    facts = dict(line.split(": ", 1) for line in lines if ": " in line)
    for file in sorted(folder.glob(f"*-{scheme.name}.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        claims = [Claim(row["nonce"], row["vector_b64"]) for row in rows]
        name = file.name.removesuffix(f"-{scheme.name}.jsonl")
        processor = facts.get("Processor", "an unknown processor").rstrip(".")
        yield RealNode(name, processor, vectors_of(claims, scheme.width))


def foreign(scheme: Scheme) -> RealNode:
    """The one whose vectors are a part of the tests."""
    read: dict[str, Any] = json.loads(FOREIGN.read_text())
    raw = base64.b64decode(read[scheme.name]["vectors_b64"])
    rows = np.frombuffer(raw, dtype="<f2").astype(np.float32).reshape(-1, scheme.width)
    return RealNode("vllm, recorded", read["processor"], dict(enumerate(rows)))
