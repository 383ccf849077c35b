"""``docs/exact.md``: how often the bits of two honest vLLM servers agree, and starts of servers."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from pydantic import BaseModel

from measuring.files import DOCS
from measuring.jobs import Job
from measuring.nodes import artifacts
from measuring.results import Kept, table
from proofserve.cli.servers import ServerOptions, serving
from proofserve.cli.session import CommandSession
from proofserve.host import ServedDtype, processor_here
from proofserve.protocol import ARTIFACT, SKETCH, SKETCH_2
from proofserve.protocol.codec import encode
from proofserve.reports import ReportedError
from proofserve_lab.chats import ClosedLoop, ask_one, reading_chat
from soundness.recorded import foreign
from soundness.subjects import BY_NAME, FOLDER, FORWARD_BATCH, SECOND_SERVER, Subject

PAGE: Final = DOCS / "exact.md"
TEXT: Final = Path(__file__).with_suffix(".txt")
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

    def of(self, subject: Subject) -> str:
        """Its name among ``STARTS``."""
        return f"{subject.arch}-{self.name}"


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
    Start("second-runner", "the second model runner", env=SECOND_SERVER),
)
BY_START: Final = {start.name: start for start in ALL}
# The first start of each dtype, with which the others are compared.
BASES: Final = (BY_START["first"], BY_START["float32"])
NOT_TRIED: Final = "-"
# The vector of each nonce, as on the wire.
Texts = dict[int, str]


class Proved(BaseModel):
    """Of one start: what it runs on, and by scheme the vector of each nonce as on the wire."""

    kernels: dict[str, str]
    vectors: dict[str, Texts]


STARTS: Final = Kept(Proved, FOLDER / "exact")


def missing() -> list[Job]:
    """The starts that have not been made yet."""
    return [
        Job(
            f"{subject.arch} {start.name}",
            ("-m", "soundness", "start", subject.arch, start.name),
            start.env,
            start.cores,
        )
        for start in ALL
        for subject in SUBJECTS
        if STARTS.read(start.of(subject)) is None
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
            nonces = subject.judged[::-1] if start.backwards else subject.judged
            made: dict[str, Texts] = {}
            for scheme in subject.schemes:
                order = subject.order(scheme)
                claims = artifacts(node, order, nonces, start.at_once, session.line)
                made[scheme] = {each.nonce: each.vector_b64 for each in claims}
        proved = Proved(kernels=node.kernels(), vectors=made)
    STARTS.write(start.of(subject), proved)


def page() -> str:
    """The page by the starts that have been made. Raises ReportedError without the first one."""
    columns = [(subject, scheme) for subject in SUBJECTS for scheme in subject.schemes]
    rows = [
        [f"{base.dtype}: {other.what}", *(_cell(*column, base, other) for column in columns)]
        for base in BASES
        for other in ALL
        if other.dtype is base.dtype and other is not base
    ]
    rows.append(["bfloat16 and float32", *(_cell(*column, *BASES) for column in columns)])
    rows.append(["bfloat16: another machine", *(_recorded(*column) for column in columns)])
    rows = [row for row in rows if {*row[1:]} != {NOT_TRIED}]
    if (first := STARTS.read(BASES[0].of(SUBJECTS[0]))) is None:
        raise ReportedError("no server has been started; run `make exact`")
    return TEXT.read_text().format(
        nonces=NONCES,
        models="; ".join(f"{each.arch} ({each.what}, {each.seq_len} tokens)" for each in SUBJECTS),
        versions=f"vLLM {first.kernels['vllm']}, torch {first.kernels['torch']}",
        machine=f"{processor_here()} ({torch.backends.cpu.get_cpu_capability()})",
        table=table(["compared", *(f"{each.arch}, {scheme}" for each, scheme in columns)], rows),
    )


def equal(one: Texts | None, other: Texts | None) -> str:
    """In how many nonces both have the same bits."""
    if one is None or other is None:
        return NOT_TRIED
    return str(sum(text == other[nonce] for nonce, text in one.items()))


def _cell(subject: Subject, scheme: str, one: Start, other: Start) -> str:
    return equal(*(_texts(subject, scheme, start) for start in (one, other)))


def _recorded(subject: Subject, scheme: str) -> str:
    if not subject.is_recorded:
        return NOT_TRIED
    vectors = foreign(subject.workload(scheme).scheme).vectors
    recorded = {nonce: encode(vectors[nonce][None])[0] for nonce in subject.judged}
    return equal(_texts(subject, scheme, BASES[0]), recorded)


def _texts(subject: Subject, scheme: str, start: Start) -> Texts | None:
    proved = STARTS.read(start.of(subject))
    return None if proved is None else proved.vectors[scheme]
