"""The errors of the fleet's store; the API shows their text to its client."""

from proofserve.rounds.errors import EngineGone, OutboxUnavailable, Refused


class StoreUnavailable(OutboxUnavailable):
    """The database did not answer, could not store, or is not of this version's fleets.

    Nothing was changed. One case is uncertain: the connection broke while the database committed.
    Every method of the store may therefore be called again with the same arguments.
    """


class NoMemberReady(EngineGone):
    """No member can prove; the text has the reasons. It can once one is ready again."""


class UnknownMember(Refused):
    """No member has this id: there never was one, or it was removed."""


class UnknownLane(Refused):
    """The round has given no lane of this number, or there is no such round."""


class NoLane(Refused):
    """A round gives a member no lane: the text says why. A lane is never given twice."""


class FleetFull(Refused):
    """The fleet has as many members as it may have."""


class NothingToVerify(Refused):
    """No verdict about the member is possible: the text says what is missing."""


class BadCallback(Exception):
    """A member's callback is not about its lane, or not of the announced form.

    ``field`` is the place in the body, ``reason`` what is wrong with it. Nothing was stored.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
