"""What every store of callbacks does: a node's outbox, and a fleet on both databases."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from endurance.fleet.postgres import Postgres
from outbox.support import HandClock, nonces_of
from proofserve.fleet.records import FleetRound, Lane
from proofserve.fleet.sql.store import FleetStore
from proofserve.outbox.planning import CallbackPolicy, SendPlan
from proofserve.outbox.store import SqliteOutbox
from proofserve.protocol.verdict.comparison import Claim
from proofserve.receiver.callbacks import Generated, GeneratedWinners
from proofserve.rounds.records import RoundSpec, Winner
from proofserve.rounds.state import Move

from .support import a_distance_spec, a_lane, a_spec, texts_of, vectors_of, winners_of

pytestmark = pytest.mark.anyio

URL = "http://a"
POLICY = CallbackPolicy()


@dataclass
class Rounds:
    """A store, the rounds in it, and their results."""

    store: SqliteOutbox | FleetStore
    clock: HandClock
    begun: int = 0
    given: dict[str, tuple[FleetRound, Lane]] = field(default_factory=dict)

    async def open(self, spec: RoundSpec) -> None:
        if isinstance(self.store, SqliteOutbox):
            await self.store.open_round(spec)
        else:
            self.given[spec.round_id] = await a_lane(self.store, spec)

    async def find(self, spec: RoundSpec, count: int) -> list[int]:
        """Store the next results of the round, and return their nonces."""
        start, self.begun = self.begun, self.begun + count
        if isinstance(self.store, FleetStore):
            opened, lane = self.given[spec.round_id]
            nonces = opened.nonces_of(lane.lane).batch(start, count)
            found = vectors_of(nonces) if spec.target is None else winners_of(nonces)
            await self.store.ingest(opened, lane, f"k{start}", found)
        else:
            assert spec.lane is not None
            nonces = spec.lane.batch(start, count)
            distances = winners_of(nonces).values[:, 0].tolist()
            pairs = zip(nonces, texts_of(nonces), distances, strict=True)
            findings = [
                Claim(nonce, text) if spec.target is None else Winner(nonce, distance)
                for nonce, text, distance in pairs
            ]
            await self.store.record(spec.round_id, self.begun, findings, {})
        return list(nonces)

    async def end(self, spec: RoundSpec) -> None:
        if isinstance(self.store, SqliteOutbox):
            await self.store.close_round(spec.round_id)
        else:
            await self.store.move(Move.STOP)

    async def plan(self, flushing: bool = False) -> SendPlan:
        return await self.store.plan(POLICY, flushing=flushing)

    async def sent(self, plan: SendPlan) -> list[int]:
        """The nonces of the one callback that is due, which is acknowledged."""
        (only,) = plan.due
        body = await self.store.body(only)
        assert await self.store.body(only) == body
        await self.store.acknowledge(only)
        return nonces_of(json.loads(body))


@pytest.fixture(params=["outbox", "sqlite", "postgresql"])
async def rounds(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rounds]:
    clock, url = HandClock(), str(tmp_path / "callbacks.sqlite")
    if request.param == "outbox":
        async with await SqliteOutbox.open(Path(url), clock) as outbox:
            yield Rounds(outbox, clock)
        return
    if request.param == "postgresql":
        server: Postgres = request.getfixturevalue("server")
        url = server.database()
    async with await FleetStore.open(url, clock) as store:
        yield Rounds(store, clock)


async def test_the_first_callback_waits_for_the_interval(rounds: Rounds) -> None:
    spec = a_spec(url=URL)
    await rounds.open(spec)
    assert await rounds.plan() == SendPlan((), None, idle=True)
    nonces = await rounds.find(spec, 2)
    rounds.clock.now += 2.0
    nonces += await rounds.find(spec, 1)
    assert await rounds.plan() == SendPlan((), 3.0, idle=False)
    rounds.clock.now += 3.0
    plan = await rounds.plan()
    assert [one.sequence for one in plan.due] == [1]
    assert await rounds.sent(plan) == nonces


async def test_the_next_one_waits_for_the_interval_and_for_the_one_before(rounds: Rounds) -> None:
    spec = a_spec(url=URL)
    await rounds.open(spec)
    nonces = await rounds.find(spec, 1)
    rounds.clock.now += 5.0
    first = await rounds.plan()
    later = await rounds.find(spec, 1)
    rounds.clock.now += 60.0
    assert (await rounds.plan()).due == first.due
    assert await rounds.sent(first) == nonces
    assert await rounds.sent(await rounds.plan()) == later
    await rounds.find(spec, 1)
    assert (await rounds.plan()).wait_s == 5.0


async def test_ending_and_flushing_do_not_wait(rounds: Rounds) -> None:
    ended, running = a_spec("r1", url=URL), a_spec("r2", url=f"{URL}/2")
    await rounds.open(ended)
    nonces = await rounds.find(ended, 1)
    await rounds.end(ended)
    await rounds.open(running)
    later = await rounds.find(running, 1)
    assert await rounds.sent(await rounds.plan()) == nonces
    assert (await rounds.plan()).due == ()
    assert await rounds.sent(await rounds.plan(flushing=True)) == later


async def test_a_result_after_the_end_is_due_too(rounds: Rounds) -> None:
    spec = a_spec(url=URL)
    await rounds.open(spec)
    nonces = await rounds.find(spec, 1)
    rounds.store.news.clear()
    nonces += await rounds.find(spec, 1)
    # Only the first result that waits wakes the sender.
    assert not rounds.store.news.is_set()
    await rounds.end(spec)
    rounds.store.news.clear()
    nonces += await rounds.find(spec, 1)
    assert rounds.store.news.is_set()
    assert await rounds.sent(await rounds.plan()) == nonces


async def test_a_round_without_url_is_never_sent(rounds: Rounds) -> None:
    spec = a_spec()
    await rounds.open(spec)
    await rounds.find(spec, 1)
    await rounds.end(spec)
    assert await rounds.plan(flushing=True) == SendPlan((), None, idle=True)
    assert (await rounds.store.gauges()).results == 1


async def test_winners_do_not_wait_and_bodies_are_those_of_the_protocol(rounds: Rounds) -> None:
    spec = a_distance_spec(url=URL)
    await rounds.open(spec)
    nonces = await rounds.find(spec, 3)
    (due,) = (await rounds.plan()).due
    body = GeneratedWinners.model_validate_json(await rounds.store.body(due))
    assert (body.nonces, body.dist) == (nonces, winners_of(nonces).values[:, 0].tolist())
    await rounds.store.acknowledge(due)
    await rounds.end(spec)
    spec = a_spec(url=URL)
    await rounds.open(spec)
    nonces = await rounds.find(spec, 3)
    (due,) = (await rounds.plan(flushing=True)).due
    raw = await rounds.store.body(due)
    of_vectors = Generated.model_validate_json(raw)
    assert [each.vector_b64 for each in of_vectors.artifacts] == texts_of(nonces)
    names = ["public_key", "block_hash", "block_height", "node_id", "artifacts", "encoding"]
    assert list(json.loads(raw)) == names
    assert b" " not in raw


async def test_sequences_rise_for_each_target_and_none_is_used_again(rounds: Rounds) -> None:
    for url in (URL, f"{URL}/", "http://b", f"{URL}//"):
        await rounds.store.enqueue("validated", url, {})
    seen = []
    while due := (await rounds.plan()).due:
        for one in due:
            seen.append((one.url, one.sequence))
            await rounds.store.fail(one, "no", None)
    assert seen == [(URL, 1), ("http://b", 1), (URL, 2), (URL, 3)]


async def test_busy_targets_and_missing_slots_wait(rounds: Rounds) -> None:
    for name in "abc":
        await rounds.store.enqueue("validated", f"http://{name}", {})
    plan = await rounds.store.plan(replace(POLICY, max_concurrent=2), frozenset([URL]))
    assert [one.url for one in plan.due] == ["http://b"]
    assert plan.wait_s is None
    assert not plan.idle


async def test_a_clock_that_is_set_back_stops_nothing(rounds: Rounds) -> None:
    spec = a_spec(url=URL)
    await rounds.open(spec)
    await rounds.find(spec, 1)
    await rounds.store.enqueue("validated", "http://b", {})
    rounds.clock.now -= 3600.0
    assert len((await rounds.plan()).due) == 2
    assert (await rounds.store.gauges()).oldest_pending_s == 0.0


async def test_a_failed_callback_comes_again_and_expires(rounds: Rounds) -> None:
    await rounds.store.enqueue("validated", URL, {"job": 1})
    (first,) = (await rounds.plan()).due
    await rounds.store.fail(first, "no", 4.0)
    assert (await rounds.plan()).wait_s == 4.0
    rounds.clock.now += 4.0
    (again,) = (await rounds.plan()).due
    assert again == replace(first, attempts=1)
    assert await rounds.store.body(again) == b'{"job":1}'
    await rounds.store.fail(again, "odd \0 and \ud800" + "x" * 10_000, None)
    # What comes late changes nothing.
    await rounds.store.acknowledge(again)
    gauges = await rounds.store.gauges()
    assert (gauges.pending, gauges.expired, gauges.delivered) == (0, 1, 0)
    assert gauges.failed_attempts == 2
    assert gauges.last_error is not None
    assert len(gauges.last_error) == 500


async def test_the_age_counts_from_the_oldest_callback(rounds: Rounds) -> None:
    for _ in range(2):
        await rounds.store.enqueue("validated", URL, {})
        rounds.clock.now += 2.0
    gauges = await rounds.store.gauges()
    assert (gauges.pending, gauges.oldest_pending_s) == (2, 4.0)


async def test_a_callback_that_no_receiver_would_accept_is_refused(rounds: Rounds) -> None:
    with pytest.raises(ValueError, match="'finished' is not one of generated, validated"):
        await rounds.store.enqueue("finished", URL, {})
    with pytest.raises(ValueError, match="not JSON compliant"):
        await rounds.store.enqueue("validated", URL, {"p_value": float("nan")})
    assert (await rounds.store.gauges()).pending == 0
