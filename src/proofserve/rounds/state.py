"""The states of a node and every legal move between them: one table, one pure step."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from proofserve.rounds.errors import AlreadyGenerating, Refused


class State(StrEnum):
    """What a node is doing about rounds."""

    IDLE = "IDLE"
    """Nothing was ever started or stopped."""
    GENERATING = "GENERATING"
    """A round's loop runs."""
    STOPPED = "STOPPED"
    """The last round has ended, by order or by a fault."""


class Move(StrEnum):
    """What can happen to a node."""

    START = "start"
    STOP = "stop"


_TABLE: Mapping[tuple[State, Move], State | Refused] = MappingProxyType(
    {
        (State.IDLE, Move.START): State.GENERATING,
        (State.STOPPED, Move.START): State.GENERATING,
        (State.GENERATING, Move.START): AlreadyGenerating("Already generating"),
        (State.IDLE, Move.STOP): State.STOPPED,
        (State.GENERATING, Move.STOP): State.STOPPED,
        (State.STOPPED, Move.STOP): State.STOPPED,
    }
)


def step(state: State, move: Move) -> State:
    """The state after ``move``. Raises the named error of a refused one; nothing changes then."""
    target = _TABLE[state, move]
    if isinstance(target, Refused):
        # A new object each time: a raised exception carries the traceback of its raising.
        raise type(target)(*target.args)
    return target
