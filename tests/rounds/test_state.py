import itertools

import pytest

from proofserve.rounds.errors import AlreadyGenerating, NotInitialised, OtherProtocol
from proofserve.rounds.state import Configured, Move, State, step

NEEDS_ROUND = {
    Move.GENERATE: NotInitialised,
    Move.VALIDATE: NotInitialised,
    Move.JUDGE: NotInitialised,
}
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
        with pytest.raises(AlreadyGenerating, match="Already generating"):
            step(state, move, Configured.DISTANCE)
        return
    expected = {**CONFIGURES, **LEADS_TO, Move.JUDGE: state, Move.STOP: State.STOPPED}
    assert step(state, move, Configured.DISTANCE) is expected[move]


@pytest.mark.parametrize(("state", "move"), PAIRS)
def test_moves_that_need_a_round_are_refused_without_one(state: State, move: Move) -> None:
    for configured in (Configured.NOTHING, Configured.ARTIFACT):
        if move not in NEEDS_ROUND:
            continue
        error = NEEDS_ROUND[move] if configured is Configured.NOTHING else OtherProtocol
        with pytest.raises(error):
            step(state, move, configured)


def test_a_refusal_is_a_new_error_each_time() -> None:
    def refusal() -> Exception:
        with pytest.raises(AlreadyGenerating) as raised:
            step(State.GENERATING, Move.START)
        return raised.value

    assert refusal() is not refusal()
