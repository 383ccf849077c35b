"""A validator has a node open what it committed to: honest, forged, deleted, silent."""

import base64
import socket
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outbox.support import serving
from proofserve.protocol.commitments import leaf, root
from proofserve.protocol.nonces import NonceLane, draw, fresh_seed
from proofserve.protocol.verdict.comparison import Reason
from proofserve.protocol.verdict.counting import SequentialResult, SequentialTest
from proofserve.remote.node_client import NodeClient, Unproved, UnprovedError
from proofserve.reports import Progress, ReportedError
from proofserve.verifier.claims import ClaimedArtifacts, Selection
from proofserve.verifier.judges import CountJudge, CountRule, Vectors
from proofserve.verifier.openings import CommittedSource, committed_from_file, open_sample
from proofserve.verifier.verification import Truth, Verification, settled, verify
from proofserve.wire.records import root_record
from support.committed import (
    ANYTHING,
    FakeNode,
    Receiver,
    as_json,
    fake_node,
    receiver,
    recomputed,
    slow_engine,
)
from support.pace import wait_until

LANE = NonceLane(1, 3)
RULE = CountRule(SequentialTest(p_honest=0.001, p_fraud=0.5), 0.01)
IMPATIENT = 0.1


@contextmanager
def served(folder: Path) -> Iterator[tuple[FakeNode, Receiver]]:
    """A node that has posted the roots of some batches of 32 to a receiver."""
    with receiver(folder) as received, fake_node(folder) as node:
        computed = node.generate(received.url, 150)
        wait_until(lambda: received.committed() == computed)
        yield node, received


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeNode, Receiver]]:
    """A node whose vectors the tests leave as they are."""
    with served(tmp_path_factory.mktemp("committed")) as made:
        yield made


@pytest.fixture
def changeable(tmp_path: Path) -> Iterator[tuple[FakeNode, Receiver]]:
    with served(tmp_path) as made:
        yield made


def opened(node: FakeNode, source: CommittedSource, seed: str, most: int = 60) -> ClaimedArtifacts:
    with NodeClient(node.url) as client:
        return open_sample(source, client, seed, most, Progress(), IMPATIENT)


def judged(claimed: ClaimedArtifacts, vectors: Callable[..., Vectors] = recomputed) -> Verification:
    judges = [CountJudge(RULE, len(claimed.nonces))]
    ours = Truth(vectors, 12, 8)
    return settled(verify(claimed, claimed.nonces, ours, judges, Progress()), claimed, ours)


def forged(nonces: Sequence[int]) -> Vectors:
    return {nonce: -vector for nonce, vector in recomputed(nonces).items()}


def never(_nonces: object) -> Vectors:
    raise AssertionError("no recomputation is needed")


def test_an_honest_node_is_cleared_by_a_fresh_sample(committed: tuple[FakeNode, Receiver]) -> None:
    node, received = committed
    source, seed = received.roots(), fresh_seed()
    claimed = opened(node, source, seed)
    assert claimed.nonces == draw(source.nonces(), seed, 60)
    assert {claim.nonce for claim in claimed.claims} == set(claimed.nonces)
    assert (claimed.faults, claimed.scheme, claimed.block_height) == ({}, "artifact-v1", 7)
    outcome = judged(claimed)
    assert (outcome.verdict, outcome.nonces_used) == (SequentialResult.HONEST, 10)
    assert opened(node, source, fresh_seed()).nonces != claimed.nonces


def test_a_vector_that_was_changed_afterwards_convicts_by_its_path(
    changeable: tuple[FakeNode, Receiver],
) -> None:
    node, received = changeable
    source, seed = received.roots(), "after"
    nonce = opened(node, source, seed).nonces[25]
    # Even the true vector of another nonce, and far behind the nonces that would clear the node.
    other = LANE.nonce(0) if nonce != LANE.nonce(0) else LANE.nonce(1)
    swap = "UPDATE results SET value = (SELECT value FROM results WHERE nonce = ?) WHERE nonce = ?"
    node.change(swap, other, nonce)
    claimed = opened(node, source, seed)
    assert claimed.faults[nonce].reason is Reason.NOT_COMMITTED
    batch, _ = source.place_of(nonce)
    assert f"does not lead to the root of lane index {batch.first_index}" in (
        claimed.faults[nonce].detail
    )
    outcome = judged(claimed, never)
    assert outcome.verdict is SequentialResult.FRAUD
    (opinion,) = outcome.opinions
    assert (opinion.test, opinion.result) == ("roots", SequentialResult.FRAUD)
    assert nonce in {mismatch.nonce for mismatch in outcome.mismatches(0.01)}


def test_a_new_root_of_changed_vectors_is_no_help(changeable: tuple[FakeNode, Receiver]) -> None:
    node, received = changeable
    source = received.roots()
    zero = base64.b64encode(bytes(24)).decode()
    nonces = LANE.batch(0, 32)
    for nonce in nonces:
        node.change("UPDATE results SET value = ? WHERE nonce = ?", zero, nonce)
    forged = root([leaf(nonce, bytes(24)) for nonce in nonces])
    node.change("UPDATE batches SET root = ? WHERE first_index = 0", forged)
    # The node's own answer is consistent now, but the validator's copy of the root decides.
    claimed = opened(node, source, "s", 10**6)
    forged_nonces = {n for n, f in claimed.faults.items() if f.reason is Reason.NOT_COMMITTED}
    assert forged_nonces == set(nonces)
    assert judged(claimed, never).verdict is SequentialResult.FRAUD


def test_a_node_that_does_not_open_a_part_is_not_cleared_by_the_rest(
    changeable: tuple[FakeNode, Receiver],
) -> None:
    node, received = changeable
    node.change("DELETE FROM results WHERE nonce = ?", LANE.nonce(33))
    claimed = opened(node, received.roots(), "s", 10**6)
    asked = len(claimed.nonces) + 32
    assert (claimed.faults, claimed.withheld and claimed.withheld.kind) == ({}, Unproved.REFUSED)
    assert not {*claimed.nonces} & {*LANE.batch(32, 32)}
    assert claimed.withheld is not None
    assert claimed.withheld.text.startswith(f"32 of {asked} drawn nonces are not opened: POST ")
    assert "410" in claimed.withheld.text
    outcome = judged(claimed)
    assert outcome.verdict is SequentialResult.UNPROVED
    assert outcome.opinions[0].result is SequentialResult.HONEST
    assert outcome.opinions[-1].figures == {"reason": "refused"}
    # What it does open still convicts.
    assert judged(claimed, forged).verdict is SequentialResult.FRAUD


def test_a_node_that_has_none_of_its_vectors_has_not_proved(
    changeable: tuple[FakeNode, Receiver],
) -> None:
    node, received = changeable
    node.change("DELETE FROM results")
    # It is not asked for all.
    with pytest.raises(UnprovedError, match="100 of 100 drawn nonces are not opened") as found:
        opened(node, received.roots(), "s", 10**6)
    assert found.value.kind is Unproved.REFUSED


def test_a_failed_nonce_is_an_empty_claim(tmp_path: Path) -> None:
    engine = slow_engine()
    engine.not_finite = frozenset({LANE.nonce(3)})
    with receiver(tmp_path) as received, fake_node(tmp_path, engine) as node:
        computed = node.generate(received.url, 32)
        wait_until(lambda: received.committed() == computed)
        claimed = opened(node, received.roots(), "s", 10**6)
    assert claimed.faults == {}
    (empty,) = [claim for claim in claimed.claims if not claim.vector_b64]
    assert empty.nonce == LANE.nonce(3)


def test_batches_that_do_not_follow_each_other_convict(
    committed: tuple[FakeNode, Receiver], tmp_path: Path
) -> None:
    node, received = committed
    source = received.roots()
    records = [root_record(batch) for batch in source.batches]
    records[2]["previous_root"] = records[0]["root"]
    broken = committed_from_file(as_json(tmp_path / "roots.json", source, records), ANYTHING)
    assert replace(broken, batches=source.batches) == source
    claimed = opened(node, broken, "s", 5)
    (fault,) = claimed.faults.values()
    assert (fault.nonce, fault.reason) == (LANE.nonce(64), Reason.NOT_COMMITTED)
    assert judged(claimed, never).verdict is SequentialResult.FRAUD
    # A callback that has not come is no fault, and who lost it is not known.
    gap = committed_from_file(
        as_json(tmp_path / "gap.json", source, [records[0], records[3]]), ANYTHING
    )
    partly = opened(node, gap, "s")
    assert (partly.faults, partly.withheld) == ({}, gap.withheld())
    assert partly.withheld is not None
    assert "roots of 64 nonces" in partly.withheld.text
    assert judged(partly).verdict is SequentialResult.UNPROVED
    assert set(gap.nonces()) == {*LANE.batch(0, 32), *LANE.batch(96, 32)}


def test_sources_that_mean_nothing_are_refused(
    committed: tuple[FakeNode, Receiver], tmp_path: Path
) -> None:
    source = committed[1].roots()
    first = root_record(source.batches[0])
    for roots, said in (([], "has no roots"), ([first, first], "two roots cover lane index 0")):
        file = as_json(tmp_path / "roots.json", source, roots)
        with pytest.raises(ReportedError, match=said) as found:
            committed_from_file(file, ANYTHING)
        assert isinstance(found.value, UnprovedError) is bool(roots)
    file = as_json(tmp_path / "roots.json", source, [first])
    with pytest.raises(ReportedError, match="--lane: the roots are of"):
        committed_from_file(file, Selection(lane=NonceLane(0, 3)))
    assert committed_from_file(file, Selection(lane=LANE)).lane == LANE


def test_several_rounds_of_a_receiver_need_an_id(changeable: tuple[FakeNode, Receiver]) -> None:
    node, received = changeable
    first = received.roots().round_id
    before = received.committed()
    computed = node.generate(received.url, 32)
    wait_until(lambda: received.committed() == before + computed)
    with pytest.raises(
        ReportedError, match=f"choose by --round-id from\n  {first}: block block, key"
    ):
        received.roots()
    assert opened(node, received.roots(first), "s").faults == {}
    with pytest.raises(ReportedError, match="no round with roots fits"):
        received.roots("other")


@contextmanager
def answering(answer: Callable[[Any], Response]) -> Iterator[str]:
    """A node that answers ``/open`` as a test says."""

    async def versions(_request: Request) -> Response:
        return JSONResponse({"versions": {}})

    async def opening(request: Request) -> Response:
        return answer(await request.json())

    routes = [
        Route("/api/v1/pow/versions", versions),
        Route("/api/v1/pow/open", opening, methods=["POST"]),
    ]
    listener = socket.create_server(("127.0.0.1", 0))
    with serving(Starlette(routes=routes), listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


GARBAGE = [
    lambda _body: Response("no JSON"),
    lambda _body: JSONResponse([]),
    lambda _body: JSONResponse({"openings": 3}),
    lambda body: JSONResponse({"openings": [{"nonce": n} for n in body["nonces"]]}),
    lambda body: JSONResponse(
        {"openings": [{"nonce": n, "vector_b64": "", "path": "AAAA"} for n in body["nonces"]]}
    ),
    lambda _body: JSONResponse({"openings": [None, "x", {"nonce": 10**30}]}),
]
REFUSALS = (401, 403, 404, 422, 429, 503)


@pytest.mark.parametrize("answer", GARBAGE)
def test_an_answer_that_opens_nothing_is_no_proof(
    committed: tuple[FakeNode, Receiver], answer: Callable[[Any], Response]
) -> None:
    assert unproved_by(answer, committed[1].roots()) is Unproved.UNREADABLE


@pytest.mark.parametrize("status", REFUSALS)
def test_a_refusal_to_open_is_no_proof(committed: tuple[FakeNode, Receiver], status: int) -> None:
    def answer(_body: Any) -> Response:
        return JSONResponse({"detail": "not now"}, status)

    assert unproved_by(answer, committed[1].roots()) is Unproved.REFUSED


def unproved_by(answer: Callable[[Any], Response], source: CommittedSource) -> Unproved:
    nothing = pytest.raises(UnprovedError, match="40 of 40 drawn nonces are not opened")
    with answering(answer) as url, NodeClient(url) as client, nothing as found:
        open_sample(source, client, "s", 40, Progress(), IMPATIENT)
    return found.value.kind


def test_a_text_that_is_no_vector_does_not_fit_a_root(committed: tuple[FakeNode, Receiver]) -> None:
    source = committed[1].roots()

    def answer(body: Any) -> Response:
        known = {"vector_b64": "no base64!", "path": ""}
        return JSONResponse({"openings": [{"nonce": n, **known} for n in body["nonces"]]})

    with answering(answer) as url, NodeClient(url) as client:
        claimed = open_sample(source, client, "s", 4, Progress(), IMPATIENT)
    assert {fault.reason for fault in claimed.faults.values()} == {Reason.NOT_COMMITTED}


def test_a_node_may_be_busy_for_a_moment(committed: tuple[FakeNode, Receiver]) -> None:
    node, received = committed
    refusals = [503, 429]

    def answer(body: Any) -> Response:
        if refusals:
            return JSONResponse({"detail": "later"}, refusals.pop())
        return JSONResponse(node.open(nonces=body["nonces"]).json())

    with answering(answer) as url, NodeClient(url) as client:
        claimed = open_sample(received.roots(), client, "s", 40, Progress(), 30.0)
    assert (claimed.faults, len(claimed.claims)) == ({}, 40)


def test_an_outage_in_the_middle_is_no_fraud(committed: tuple[FakeNode, Receiver]) -> None:
    """The node opens the first hundred, and then only refuses to."""
    node, received = committed
    calls = 0

    def answer(body: Any) -> Response:
        nonlocal calls
        calls += 1
        if calls > 1:
            return JSONResponse({"detail": "restarting"}, 503)
        return JSONResponse(node.open(nonces=body["nonces"]).json())

    with answering(answer) as url, NodeClient(url) as client:
        claimed = open_sample(received.roots(), client, "s", 150, Progress(), IMPATIENT)
    assert (len(claimed.claims), claimed.faults) == (100, {})
    assert judged(claimed).verdict is SequentialResult.UNPROVED


def test_a_node_that_is_late_or_away_is_named(committed: tuple[FakeNode, Receiver]) -> None:
    source = committed[1].roots()
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        # It takes the connection, and never answers.
        with NodeClient(url, timeout_s=0.2) as client, pytest.raises(UnprovedError) as late:
            open_sample(source, client, "s", 4, Progress(), IMPATIENT)
    with NodeClient(url) as client, pytest.raises(UnprovedError, match="refused") as away:
        open_sample(source, client, "s", 4, Progress(), IMPATIENT)
    assert (late.value.kind, away.value.kind) == (Unproved.LATE, Unproved.UNREACHABLE)


def test_the_receivers_file_is_read_beside_the_receiver(
    committed: tuple[FakeNode, Receiver],
) -> None:
    _, received = committed
    with closing(sqlite3.connect(received.file)) as file:
        (count,) = file.execute("SELECT count(*) FROM roots").fetchone()
    assert len(received.roots().batches) == count > 4
