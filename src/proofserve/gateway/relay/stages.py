"""The stages of an exchange and every legal move between them: one table, one step (ADR 18)."""

import enum
from collections.abc import Mapping


class Stage(enum.IntEnum):
    """What an exchange waits for."""

    RECEIVING = 0
    """The body of the request."""
    PIPELINED = 1
    """The answer to an earlier request of the same connection."""
    QUEUED = 2
    """A permit."""
    CONNECTING = 3
    """A connection to the chosen backend. From here on the exchange has a permit."""
    WAITING = 4
    """The head of the backend's answer."""
    RELAYING = 5
    """The rest of the answer."""
    ENDED = 6
    """Nothing: all that it held is free."""


class Move(enum.IntEnum):
    """What can happen to an exchange."""

    HOLD = 0
    """An earlier request of the connection is not answered yet."""
    RESUME = 1
    """All earlier requests of the connection are answered."""
    QUEUE = 2
    """Every permit is in use."""
    GRANT = 3
    """The exchange gets a permit."""
    SEND = 4
    """The connection stands, and the request leaves on it."""
    RETRY = 5
    """The same or another backend is tried again."""
    RELAY = 6
    """The head of the answer goes to the client."""
    END = 7
    """The answer is complete, a failure is told, or the client has left."""


class IllegalMove(RuntimeError):
    """A move that the stage does not allow: a fault of the gateway's own."""


# One look-up of a member costs more than a comparison with it, and a request does a dozen of them.
RECEIVING, PIPELINED, QUEUED, CONNECTING, WAITING, RELAYING, ENDED = Stage
HOLD, RESUME, QUEUE, GRANT, SEND, RETRY, RELAY, END = Move

# One line for a move: from which stage it leads to which.
TABLE: Mapping[Move, Mapping[Stage, Stage]] = {
    HOLD: {RECEIVING: PIPELINED},
    RESUME: {PIPELINED: RECEIVING},
    QUEUE: {RECEIVING: QUEUED},
    GRANT: {RECEIVING: CONNECTING, QUEUED: CONNECTING},
    SEND: {CONNECTING: WAITING},
    RETRY: {CONNECTING: CONNECTING, WAITING: CONNECTING},
    RELAY: {WAITING: RELAYING},
    END: dict.fromkeys((RECEIVING, PIPELINED, QUEUED, CONNECTING, WAITING, RELAYING), ENDED),
}


def step(stage: Stage, move: Move) -> Stage:
    """The stage after ``move``. Raises IllegalMove."""
    target = TABLE[move].get(stage)
    if target is None:
        raise IllegalMove(f"{move.name} in stage {stage.name}")
    return target
