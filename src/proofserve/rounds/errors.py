"""The errors of rounds, jobs, the engine and the outbox."""


class RoundsError(Exception):
    """Base class. The API shows the text to its client."""


class Refused(RoundsError):
    """A valid request that the present state does not allow. Nothing was changed."""


class AlreadyGenerating(Refused):
    """A round is running; stop it before starting another."""


class NotInitialised(Refused):
    """No round of the distance protocol is configured."""


class OtherProtocol(Refused):
    """The call is of the distance protocol, the configured round of the artifact protocol."""


class OtherRound(Refused):
    """The claims are about another block than the configured round."""


class LaneUnset(Refused):
    """The configured round has no node number and node count, so it has no nonces to prove."""


class QueueFull(Refused):
    """The job would exceed the number of nonces that may wait."""


class UnknownJob(Refused):
    """No job has this id: it never existed, has expired, or a stop removed it."""


class UnknownRound(Refused):
    """The outbox has no round of this block and key: there never was one, or it is deleted."""


class UnknownNonce(Refused):
    """The nonce is in no batch of the round, or not yet."""


class NotCommitted(Refused):
    """The round publishes vectors, so that there is no root to open."""


class SeveralRounds(Refused):
    """Several rounds of the block and key publish roots, and the request names none of them."""


class VectorsDeleted(Refused):
    """The vectors of the nonce's batch were deleted some days after their root was delivered."""


class UnknownReceipt(Refused):
    """No answer with this id has a receipt, or not yet, or its receipt was deleted long ago."""


class ReceiptDeleted(Refused):
    """The receipt was deleted after its time to live."""


class ReceiptNotLogged(Refused):
    """The receipt is stored, and enters the log within about a second."""


class WaitsFull(QueueFull):
    """Too many requests wait for receipts that are not known yet."""


class ShuttingDown(Refused):
    """The server shuts down and starts nothing new."""


class ChatBusy(RoundsError):
    """Chat used the engine for as long as the call may wait. Nothing was computed."""


class EngineFault(RoundsError):
    """The engine could not compute a batch. It still runs and may compute the next one."""


class EngineGone(RoundsError):
    """The engine process is dead. Nothing can be computed until the server restarts."""


class OutboxUnavailable(RoundsError):
    """The outbox could not store a result. Nothing was stored."""
