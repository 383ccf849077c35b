"""The states of a node and every legal move between them: one table, one pure step."""

from collections.abc import Mapping
from enum import StrEnum

from proofserve.rounds.errors import Refusal, Refused
from proofserve.rounds.records import RoundSpec


class State(StrEnum):
    IDLE = "IDLE"
    """No round runs: none is configured, or the configured one has not started."""
    GENERATING = "GENERATING"
    """A round generates proofs."""
    VALIDATING = "VALIDATING"
    """The configured round judges claims and sends its verdicts to its callback URL."""
    STOPPED = "STOPPED"
    """The last round was stopped or ended by a fault. It may continue."""


class Move(StrEnum):
    INIT = "init"
    """Configure a round without starting it."""
    START = "start"
    """Configure a round and generate."""
    INIT_VALIDATE = "init and validate"
    """Configure a round and judge."""
    GENERATE = "generate"
    """Let the configured round generate."""
    VALIDATE = "validate"
    """Let the configured round judge."""
    JUDGE = "judge"
    """Judge one batch of claims by the parameters of the configured round."""
    STOP = "stop"


_BUSY = Refusal.ALREADY_GENERATING
# The next state: one line for each move, one column for each state in the order of State. None
# keeps the state.
_LINES: Mapping[Move, tuple[State | Refusal | None, ...]] = {
    Move.INIT: (State.IDLE, _BUSY, State.IDLE, State.IDLE),
    Move.START: (State.GENERATING, _BUSY, State.GENERATING, State.GENERATING),
    Move.INIT_VALIDATE: (State.VALIDATING, _BUSY, State.VALIDATING, State.VALIDATING),
    Move.GENERATE: (State.GENERATING, None, State.GENERATING, State.GENERATING),
    Move.VALIDATE: (State.VALIDATING, State.VALIDATING, None, State.VALIDATING),
    Move.JUDGE: (None, None, None, None),
    Move.STOP: (State.STOPPED, State.STOPPED, State.STOPPED, None),
}
# These moves need a configured round of the distance protocol; the text says that there is none.
_NEEDS_ROUND: Mapping[Move, str] = {
    Move.GENERATE: "PoC not initialized",
    Move.VALIDATE: "PoC not initialized",
    Move.JUDGE: "No round configured",
}


def step(state: State, move: Move, configured: RoundSpec | None = None) -> State:
    """The state after ``move``, with the ``configured`` round. Raises Refused if not allowed."""
    if move in _NEEDS_ROUND:
        if configured is None:
            raise Refused(Refusal.NOT_INITIALISED, _NEEDS_ROUND[move])
        if configured.target is None:
            raise Refused(
                Refusal.OTHER_PROTOCOL,
                "the configured round is of the artifact protocol; this call belongs to the"
                " distance protocol: initialise a round with r_target first",
            )
    target = _LINES[move][list(State).index(state)]
    if isinstance(target, Refusal):
        raise Refused(target, "Already generating")
    return state if target is None else target
