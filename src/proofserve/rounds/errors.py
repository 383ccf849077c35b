"""The errors of rounds, jobs, the engine and the outbox."""

from enum import StrEnum


class RoundsError(Exception):
    """Base class. The API shows the text to its client."""


class Refusal(StrEnum):
    """Why the present state does not allow a valid request. The metric of refusals has these."""

    ALREADY_GENERATING = "already_generating"
    NOT_INITIALISED = "not_initialised"
    """No round of the distance protocol is configured."""
    OTHER_PROTOCOL = "other_protocol"
    """The call is of the distance protocol, the configured round of the artifact protocol."""
    OTHER_ROUND = "other_round"
    """The claims are about another block than the configured round."""
    LANE_UNSET = "lane_unset"
    """The configured round has no node number and node count, so it has no nonces to prove."""
    QUEUE_FULL = "queue_full"
    """The job would exceed the number of nonces that may wait."""
    UNKNOWN_JOB = "unknown_job"
    """No job has this id: it never existed, has expired, or a stop removed it."""
    UNKNOWN_ROUND = "unknown_round"
    """The outbox has no round of this block and key: there never was one, or it is deleted."""
    UNKNOWN_NONCE = "unknown_nonce"
    """The nonce is in no batch of the round, or not yet."""
    NOT_COMMITTED = "not_committed"
    """The round publishes vectors, so that there is no root to open."""
    SEVERAL_ROUNDS = "several_rounds"
    """Several rounds of the block and key publish roots, and the request names none of them."""
    VECTORS_DELETED = "vectors_deleted"
    """The vectors of the nonce's batch were deleted some days after their root was delivered."""
    UNKNOWN_RECEIPT = "unknown_receipt"
    """No answer with this id has a receipt, or not yet, or its receipt was deleted long ago."""
    RECEIPT_DELETED = "receipt_deleted"
    RECEIPT_NOT_LOGGED = "receipt_not_logged"
    """The receipt is stored, and enters the log within about a second."""
    WAITS_FULL = "waits_full"
    """Too many requests wait for receipts that are not known yet."""
    CHAT_BUSY = "chat_busy"
    """Chat used the engine for as long as the call may wait."""
    SHUTTING_DOWN = "shutting_down"
    UNKNOWN_MEMBER = "unknown_member"
    """No member of the fleet has this id: there never was one, or it was removed."""
    UNKNOWN_LANE = "unknown_lane"
    """The fleet's round has given no lane of this number, or there is no such round."""
    NO_LANE = "no_lane"
    """A fleet's round gives a member no lane: the text says why. A lane is never given twice."""
    FLEET_FULL = "fleet_full"
    NOTHING_TO_VERIFY = "nothing_to_verify"
    """No verdict about the member is possible: the text says what is missing."""


class Refused(RoundsError):
    """A valid request that the present state does not allow. Nothing was changed."""

    def __init__(self, reason: Refusal, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class EngineFault(RoundsError):
    """The engine could not compute a batch. It still runs and may compute the next one."""


class EngineGone(RoundsError):
    """The engine process is dead. Nothing can be computed until the server restarts."""


class OutboxUnavailable(RoundsError):
    """The outbox could not store a result. Nothing was stored."""
