"""The stages of an exchange and every legal move between them: one table, one step (ADR 18)."""

import enum
from collections.abc import Mapping


class Stage(enum.IntEnum):
    """What an exchange waits for."""

    RECEIVING = 0  # the body of the request
    PIPELINED = 1  # the answer to an earlier request of the same connection
    QUEUED = 2  # a permit
    CONNECTING = 3  # a connection to the chosen backend; from here on the exchange has a permit
    WAITING = 4  # the head of the backend's answer
    RELAYING = 5  # the rest of the answer
    ENDED = 6  # nothing: all that it held is free


class StageMove(enum.IntEnum):
    HOLD = 0  # an earlier request of the connection is not answered yet
    RESUME = 1  # all earlier requests of the connection are answered
    QUEUE = 2  # every permit is in use
    GRANT = 3  # the exchange gets a permit
    SEND = 4  # the connection stands, and the request leaves on it
    RETRY = 5  # the same or another backend is tried again
    RELAY = 6  # the head of the answer goes to the client
    END = 7  # the answer is complete, a failure is told, or the client has left


class IllegalMove(RuntimeError):
    """A move that the stage does not allow: a fault of the gateway's own."""


# One look-up of a member costs more than a comparison with it, and a request does a dozen of them.
RECEIVING, PIPELINED, QUEUED, CONNECTING, WAITING, RELAYING, ENDED = Stage
HOLD, RESUME, QUEUE, GRANT, SEND, RETRY, RELAY, END = StageMove

# One line for a move: from which stage it leads to which.
TABLE: Mapping[StageMove, Mapping[Stage, Stage]] = {
    HOLD: {RECEIVING: PIPELINED},
    RESUME: {PIPELINED: RECEIVING},
    QUEUE: {RECEIVING: QUEUED},
    GRANT: {RECEIVING: CONNECTING, QUEUED: CONNECTING},
    SEND: {CONNECTING: WAITING},
    RETRY: {CONNECTING: CONNECTING, WAITING: CONNECTING},
    RELAY: {WAITING: RELAYING},
    END: dict.fromkeys((RECEIVING, PIPELINED, QUEUED, CONNECTING, WAITING, RELAYING), ENDED),
}


def step(stage: Stage, move: StageMove) -> Stage:
    """The stage after ``move``. Raises IllegalMove."""
    try:
        return TABLE[move][stage]
    except KeyError:
        raise IllegalMove(f"{move.name} in stage {stage.name}") from None
