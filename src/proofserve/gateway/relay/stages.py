"""How far an exchange is."""

import enum


class Stage(enum.Enum):
    """What an exchange waits for."""

    RECEIVING = enum.auto()
    QUEUED = enum.auto()
    CONNECTING = enum.auto()
    WAITING = enum.auto()
    RELAYING = enum.auto()
    ENDED = enum.auto()


# To look a member up costs more than the comparison with it, and a request does so a dozen times.
RECEIVING, QUEUED, CONNECTING, WAITING, RELAYING, ENDED = Stage
