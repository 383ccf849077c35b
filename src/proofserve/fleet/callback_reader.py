"""Reads the bodies of members' callbacks: fast, because a fleet may get a million nonces a second."""

from proofserve.fleet.records import FleetRound, MemberFindings


def read(body: bytes, round_: FleetRound, lane: int) -> MemberFindings:
    """What a member found, from the body of its ``/generated`` callback.

    Checks all of it: block, key and node number are those of the round, vectors have its width and
    finite values in canonical base64, distances are below its target, nonces are distinct and of
    this lane. Raises BadCallback with the field. It needs no event loop; a large body takes tenths
    of a second, so call it in a thread.
    """
    ...
