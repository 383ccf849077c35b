import itertools

import pytest

from proofserve.rounds.errors import AlreadyGenerating
from proofserve.rounds.state import Move, State, step

REFUSED = {(State.GENERATING, Move.START): AlreadyGenerating}


@pytest.mark.parametrize(("state", "move"), list(itertools.product(State, Move)))
def test_every_pair_is_a_move_or_a_named_refusal(state: State, move: Move) -> None:
    if (state, move) in REFUSED:
        with pytest.raises(REFUSED[state, move], match="Already generating"):
            step(state, move)
    else:
        assert step(state, move) in State


def test_starting_generates_and_stopping_stops() -> None:
    assert step(State.IDLE, Move.START) is State.GENERATING
    assert step(State.STOPPED, Move.START) is State.GENERATING
    assert {step(state, Move.STOP) for state in State} == {State.STOPPED}


def test_a_refusal_is_a_new_error_each_time() -> None:
    def refusal() -> Exception:
        with pytest.raises(AlreadyGenerating) as raised:
            step(State.GENERATING, Move.START)
        return raised.value

    assert refusal() is not refusal()
