"""``docs/exact.md``: how often the bits of two honest vLLM servers agree."""

from pathlib import Path
from typing import Final

import torch

from proofserve.host import processor_here
from proofserve.protocol.codec import encode
from proofserve.reports import ReportedError
from soundness.exact import ALL, BY_START, NONCES, SUBJECTS, Proved, Start
from soundness.page import table
from soundness.recorded import foreign
from soundness.subjects import ROOT, Subject

PAGE: Final = ROOT / "docs" / "exact.md"
TEXT: Final = Path(__file__).with_suffix(".txt")
NOT_TRIED: Final = "-"
# The first start of each dtype, with which the others are compared.
BASES: Final = (BY_START["first"], BY_START["float32"])
# The vector of each nonce, as on the wire.
Texts = dict[int, str]


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
    if (first := _proved(SUBJECTS[0], BASES[0])) is None:
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
    proved = _proved(subject, start)
    return None if proved is None else proved.vectors[scheme]


def _proved(subject: Subject, start: Start) -> Proved | None:
    file = start.file(subject)
    return Proved.model_validate_json(file.read_text()) if file.is_file() else None
