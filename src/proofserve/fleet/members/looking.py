"""One look at a member: its status as a ``Seen``."""

from dataclasses import replace

from proofserve.fleet.members.client import (
    MemberAnswered,
    MemberClient,
    MemberError,
    NonsenseAnswered,
)
from proofserve.fleet.members.member_status import MemberStatus, read_status
from proofserve.fleet.records import Seen

# A server that gives one of these answers, and its proofs are not for this fleet as it is.
_REFUSALS = {401, 403, 404, 405}
_PROOFS_OFF = "PoC not enabled"


async def look(client: MemberClient, before: Seen | None, now: float) -> Seen:
    """What the member says of itself at the time ``now``.

    A member without an answer keeps what ``before`` had, and the time of it.
    """
    try:
        answer = await client.status()
    except NonsenseAnswered as error:
        return Seen(now, answered=True, error=str(error))
    except MemberError as error:
        if error.status in _REFUSALS or _PROOFS_OFF in str(error):
            return Seen(now, answered=True, error=_advice(error))
        if before is None:
            return Seen(now, answered=False, error=str(error))
        return replace(before, answered=False, error=str(error))
    return seen_of(answer, now)


def seen_of(answer: MemberAnswered, now: float) -> Seen:
    """What an answer to ``GET /status`` says."""
    try:
        status = read_status(answer.body)
    except ValueError as error:
        return Seen(now, answered=True, error=f"answered nonsense to GET /status: {error}")
    return _facts(status, answer, now)


def _advice(error: MemberError) -> str:
    if _PROOFS_OFF in str(error):
        return "its proofs are off: start it with --enable-poc"
    if error.status in (401, 403):
        return (
            f"it refuses the fleet's key ({error}): compare FLEET_MEMBER_KEY with its POC_API_KEY"
        )
    return f"it has no proof endpoints ({error}): start it with --enable-poc"


def _facts(status: MemberStatus, answer: MemberAnswered, now: float) -> Seen:
    deployment = status.deployment
    stalled_s = max((core.waited_s for core in status.liveness if core.stalled), default=0.0)
    seen = Seen(
        at=now,
        answered=True,
        clock_offset_s=answer.clock_offset_s,
        stalled_s=stalled_s,
        # Only what was read and checked: the rest is the member's, and may be anything.
        status=status.model_dump(mode="json"),
    )
    if deployment is None:
        return replace(
            seen, error="its proofserve knows no fleets (GET /status has no deployment): update it"
        )
    return replace(
        seen,
        model_names=tuple(deployment.models),
        weights_digest=deployment.weights_digest,
        hidden_size=deployment.hidden_size,
        max_seq_len=deployment.max_seq_len,
        versions=deployment.versions,
        scheme=deployment.scheme,
    )
