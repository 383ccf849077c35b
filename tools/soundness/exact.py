"""Starts of vLLM servers, and what each proves: by them ``exact_page`` counts equal bits."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from matrix.columns import INTERPRETER
from proofserve.cli.servers import ServerOptions, serving
from proofserve.cli.session import CommandSession
from proofserve.host import ServedDtype
from proofserve.protocol import ARTIFACT, SKETCH, SKETCH_2
from proofserve.remote.chats import ClosedLoop, ask_one, reading_chat
from proofserve.remote.node_client import NodeClient
from proofserve.rounds.computation import chunks
from soundness.jobs import Job
from soundness.subjects import BY_NAME, FOLDER, FORWARD_BATCH, ROOT, Subject

STARTS: Final = FOLDER / "exact"
NONCES: Final = 64
# Of a round's calls, unless the order is another one.
AT_ONCE: Final = 8
ODD: Final = 5
CHAT_CLIENTS, CHAT_WORDS, SHARE = 2, 40, 0.3

_SCHEMES: Final = {"trained": (SKETCH, ARTIFACT), "qwen3_moe": (SKETCH_2, ARTIFACT)}
SUBJECTS: Final = tuple(
    replace(BY_NAME[arch], schemes=schemes, nonces=NONCES) for arch, schemes in _SCHEMES.items()
)


@dataclass(frozen=True, slots=True)
class Start:
    """A server, and how it is asked: in calls of ``at_once``, perhaps backwards, beside chat.

    ``what`` says in which it differs from the first one of its dtype.
    """

    name: str
    what: str
    dtype: ServedDtype = "bfloat16"
    ranks: int = 1
    forward_batch: int = FORWARD_BATCH
    at_once: int = AT_ONCE
    backwards: bool = False
    chats: bool = False
    cores: int = 1
    env: Mapping[str, str] = field(default_factory=dict)

    def file(self, subject: Subject) -> Path:
        return STARTS / f"{subject.arch}-{self.name}.json"


_SECOND_RUNNER: Final = {
    **{"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"},
    "PYTHONPATH": f"{ROOT / 'src'}:{INTERPRETER}",
}
_AVX2: Final = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
_F32: Final = "float32"
ALL: Final = (
    Start("first", "in bfloat16"),
    Start("again", "a second start"),
    Start("backwards", "calls of 5 nonces instead of 8, backwards", at_once=ODD, backwards=True),
    Start("forwards-of-3", "forwards of 3 nonces instead of 8", forward_batch=3),
    Start("two-ranks", "two ranks", ranks=2, cores=2),
    Start("avx2", "torch and oneDNN kept to AVX2", env=_AVX2),
    Start("beside-chat", "beside endless chat", chats=True),
    Start("float32", "in float32", dtype=_F32),
    Start("float32-two-ranks", "two ranks", dtype=_F32, ranks=2, cores=2),
    Start("float32-avx2", "torch and oneDNN kept to AVX2", dtype=_F32, env=_AVX2),
    Start("two-threads", "two threads", cores=2, env={"OMP_NUM_THREADS": "2"}),
    Start("float32-again", "a second start", dtype=_F32),
    Start("second-runner", "the second model runner", env=_SECOND_RUNNER),
)
BY_START: Final = {start.name: start for start in ALL}


class Proved(BaseModel):
    """Of one start: what it runs on, and by scheme the vector of each nonce as on the wire."""

    kernels: dict[str, str]
    vectors: dict[str, dict[int, str]]


def missing() -> list[Job]:
    """The starts that have not been made yet."""
    return [
        Job(
            f"{subject.arch} {start.name}",
            ("start", subject.arch, start.name),
            start.env,
            start.cores,
        )
        for start in ALL
        for subject in SUBJECTS
        if not start.file(subject).is_file()
    ]


def prove(subject: Subject, start: Start, session: CommandSession) -> None:
    """Start the server and keep what it proves. Raises ServerFailed and NodeError."""
    model = subject.model
    options = ServerOptions(
        model.folder,
        model.name,
        start.forward_batch,
        ranks=start.ranks,
        share=SHARE if start.chats else 0.0,
        dtype=start.dtype,
    )
    with serving(options, session) as node:
        loop = (
            ClosedLoop(
                node.url, lambda n: reading_chat(model.name, n, CHAT_WORDS), CHAT_CLIENTS, ask_one
            )
            if start.chats
            else nullcontext()
        )
        with loop:
            made = {
                scheme: _vectors(node, subject, scheme, start, session)
                for scheme in subject.schemes
            }
        proved = Proved(kernels=node.kernels(), vectors=made)
    STARTS.mkdir(parents=True, exist_ok=True)
    start.file(subject).write_text(proved.model_dump_json())


def _vectors(
    node: NodeClient, subject: Subject, scheme: str, start: Start, session: CommandSession
) -> dict[int, str]:
    nonces = subject.judged[::-1] if start.backwards else subject.judged
    calls = chunks(nonces, start.at_once)
    session.line.step(f"{scheme}: {len(nonces)} nonces", len(calls))
    made: dict[int, str] = {}
    for call in calls:
        made |= {
            each.nonce: each.vector_b64 for each in node.artifacts(subject.order(scheme), call)
        }
        session.line.advance()
    return made
