"""The errors of the fleet's store; the API shows their text to its client."""

from proofserve.rounds.errors import EngineGone, OutboxUnavailable


class StoreUnavailable(OutboxUnavailable):
    """The database did not answer, could not store, or is not of this version's fleets.

    Nothing was changed. One case is uncertain: the connection broke while the database committed.
    Every method of the store may therefore be called again with the same arguments.
    """


class NoMemberReady(EngineGone):
    """No member can prove; the text has the reasons. It can once one is ready again."""
