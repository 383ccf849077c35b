"""``make exact`` in its short form: starts that were recorded, and the page of them."""

from pathlib import Path

import pytest

from measuring.results import Kept
from proofserve.protocol.codec import encode
from proofserve.reports import ReportedError
from soundness import exact
from soundness.exact import ALL, BY_START, SUBJECTS, Proved, Start
from soundness.recorded import foreign

KERNELS = {"vllm": "0.32.0", "torch": "2.13.0"}


@pytest.fixture(autouse=True)
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "STARTS", Kept(Proved, tmp_path))


def keep(start: Start, other: int = 0) -> None:
    """A start of the trained model that has other bits in the first ``other`` nonces."""
    subject = SUBJECTS[0]
    vectors = {}
    for scheme in subject.schemes:
        rows = foreign(subject.workload(scheme).scheme).vectors
        texts = {nonce: encode(rows[nonce][None])[0] for nonce in subject.judged}
        vectors[scheme] = {n: text[::-1] if n < other else text for n, text in texts.items()}
    exact.STARTS.write(start.of(subject), Proved(kernels=KERNELS, vectors=vectors))


def row(page: str, name: str) -> list[str]:
    (found,) = (line for line in page.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


def test_the_page_counts_equal_bits_beside_the_first_start() -> None:
    keep(BY_START["first"])
    keep(BY_START["again"])
    keep(BY_START["two-ranks"], other=5)
    page = exact.page()
    assert row(page, "bfloat16: a second start") == ["64", "64", "-", "-"]
    assert row(page, "bfloat16: two ranks") == ["59", "59", "-", "-"]
    assert row(page, "bfloat16: another machine") == ["64", "64", "-", "-"]
    assert "float32: two ranks" not in page
    assert "vLLM 0.32.0, torch 2.13.0" in page


def test_what_was_started_is_not_started_again() -> None:
    names = {job.name for job in exact.missing()}
    assert len(names) == len(ALL) * len(SUBJECTS)
    keep(BY_START["again"])
    assert names - {job.name for job in exact.missing()} == {"trained again"}


def test_without_a_start_there_is_no_page() -> None:
    with pytest.raises(ReportedError, match="make exact"):
        exact.page()
