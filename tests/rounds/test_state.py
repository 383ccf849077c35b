import itertools

import pytest

from proofserve.rounds.errors import Refusal
from proofserve.rounds.records import Target
from proofserve.rounds.state import Move, State, step
from rounds.doubles import round_spec
from support.refusals import refused

ARTIFACT, DISTANCE = round_spec(), round_spec(target=Target(1.4))
NEEDS_ROUND = {Move.GENERATE, Move.VALIDATE, Move.JUDGE}
CONFIGURES = {
    Move.INIT: State.IDLE,
    Move.START: State.GENERATING,
    Move.INIT_VALIDATE: State.VALIDATING,
}
LEADS_TO = {Move.GENERATE: State.GENERATING, Move.VALIDATE: State.VALIDATING}
PAIRS = list(itertools.product(State, Move))


@pytest.mark.parametrize(("state", "move"), PAIRS)
def test_with_a_distance_round_only_a_second_round_is_refused(state: State, move: Move) -> None:
    if state is State.GENERATING and move in CONFIGURES:
        with refused(Refusal.ALREADY_GENERATING, match="Already generating"):
            step(state, move, DISTANCE)
        return
    expected = {**CONFIGURES, **LEADS_TO, Move.JUDGE: state, Move.STOP: State.STOPPED}
    assert step(state, move, DISTANCE) is expected[move]


@pytest.mark.parametrize(("state", "move"), PAIRS)
def test_moves_that_need_a_round_are_refused_without_one(state: State, move: Move) -> None:
    if move in NEEDS_ROUND:
        with refused(Refusal.NOT_INITIALISED):
            step(state, move, None)
        with refused(Refusal.OTHER_PROTOCOL):
            step(state, move, ARTIFACT)


def test_a_refusal_is_a_new_error_each_time() -> None:
    def refusal() -> Exception:
        with refused(Refusal.ALREADY_GENERATING) as raised:
            step(State.GENERATING, Move.START)
        return raised.value

    assert refusal() is not refusal()
