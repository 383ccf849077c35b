from dataclasses import replace

import pytest

from proofserve.fleet.records import DesiredState
from proofserve.fleet.sql.rounds import MOST_LANES, rounds_where
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.sql.tables import round_about, rounds
from proofserve.protocol.nonces import NonceLane
from proofserve.rounds.errors import Refusal
from proofserve.rounds.state import Move, State
from support.refusals import refused

from .support import a_distance_spec, a_spec, desired_of, round_of

pytestmark = pytest.mark.anyio


async def test_nothing_is_desired_at_first(store: FleetStore) -> None:
    assert await desired_of(store) == DesiredState(State.IDLE, None)
    assert await round_of(store, "r1") is None
    assert await store.move(Move.STOP) == DesiredState(State.STOPPED, None)


@pytest.mark.parametrize("spec", [a_spec(url="http://t/x"), a_spec(roots=True), a_distance_spec()])
async def test_a_round_is_read_as_it_was_opened(url: str, spec: object) -> None:
    async with await FleetStore.open(url) as store:
        opened = await store.open_round(spec, 64)  # type: ignore[arg-type]
        assert (opened.spec, opened.lanes, opened.ended_at) == (spec, 64, None)
    of_key, of_other = (rounds.c.about == round_about("b10c", key) for key in ("k3y", "other"))
    async with await FleetStore.open(url) as store:
        assert await desired_of(store) == DesiredState(State.GENERATING, opened)
        assert await round_of(store, opened.id) == opened
        assert await store.database.read(rounds_where, of_key) == [opened]
        assert await store.database.read(rounds_where, of_other) == []


async def test_the_next_round_ends_the_one_before(store: FleetStore) -> None:
    first = await store.open_round(a_spec("r1"), 8, Move.INIT)
    second = await store.open_round(a_spec("r2"), 8)
    assert second.number > first.number
    assert (await desired_of(store)).round == second
    ended = await round_of(store, "r1")
    assert ended is not None
    assert ended.ended_at is not None
    with refused(Refusal.ALREADY_GENERATING):
        await store.open_round(a_spec("r3"), 8)
    assert await desired_of(store) == DesiredState(State.GENERATING, second)
    assert await round_of(store, "r3") is None


async def test_a_stopped_distance_round_goes_on(store: FleetStore) -> None:
    opened = await store.open_round(a_distance_spec(), 8)
    stopped = await store.move(Move.STOP)
    assert stopped.state is State.STOPPED
    assert stopped.round is not None
    assert stopped.round.ended_at is not None
    assert await store.move(Move.GENERATE) == DesiredState(State.GENERATING, opened)
    assert await store.move(Move.VALIDATE) == DesiredState(State.VALIDATING, opened)


async def test_moves_are_legal_as_on_a_node(store: FleetStore) -> None:
    with refused(Refusal.NOT_INITIALISED):
        await store.move(Move.GENERATE)
    judged = replace(a_distance_spec(), lane=None)
    with refused(Refusal.LANE_UNSET):
        await store.open_round(judged, 8)
    assert (await store.open_round(judged, 8, Move.INIT_VALIDATE)).lanes == 0
    with refused(Refusal.LANE_UNSET):
        await store.move(Move.GENERATE)
    await store.open_round(a_spec(), 8, Move.INIT)
    with refused(Refusal.OTHER_PROTOCOL):
        await store.move(Move.GENERATE)


@pytest.mark.parametrize("lanes", [0, -1, MOST_LANES + 1])
async def test_the_number_of_lanes_has_a_range(store: FleetStore, lanes: int) -> None:
    with pytest.raises(ValueError, match=f"lanes is {lanes}"):
        await store.open_round(a_spec(), lanes)


async def test_a_round_id_is_used_once(store: FleetStore) -> None:
    await store.open_round(a_spec(), 8)
    await store.move(Move.STOP)
    with pytest.raises(ValueError, match="opened before"):
        await store.open_round(a_spec(), 8)
    with pytest.raises(ValueError, match="configures no round"):
        await store.open_round(a_spec("r2"), 8, Move.STOP)


async def test_the_lanes_of_a_round_hold_its_nonces_once(store: FleetStore) -> None:
    opened = await store.open_round(a_spec(), 3)
    own = NonceLane(3, 4, 1, 2)
    lanes = [opened.nonces_of(lane) for lane in range(3)]
    nonces = sorted(nonce for lane in lanes for nonce in lane.batch(0, 100))
    assert tuple(nonces) == own.batch(0, 300)
    for lane in (-1, 3):
        with pytest.raises(ValueError, match="no lane"):
            opened.nonces_of(lane)
