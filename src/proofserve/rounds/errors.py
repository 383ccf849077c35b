"""Every way a round, a job or their seams can refuse or fail, one name each."""


class RoundsError(Exception):
    """Root of this layer's errors. The text is for the caller of the API."""


class Refused(RoundsError):
    """A legal request that the present state does not allow. Nothing was changed."""


class AlreadyGenerating(Refused):
    """A round is running; stop it before starting another."""


class NotInitialised(Refused):
    """There is no round of the distance protocol that could go on."""


class NoRound(Refused):
    """There is no round of the distance protocol whose rules could judge a claim."""


class OtherProtocol(Refused):
    """The configured round is of the artifact protocol, which has no such call."""


class OtherRound(Refused):
    """The claims are about another block than the configured round."""


class LaneUnset(Refused):
    """The configured round was not told which nonces are its own."""


class QueueFull(Refused):
    """The job would exceed the number of nonces that may wait."""


class UnknownJob(Refused):
    """No job of this id: never there, expired, or cleared by a stop."""


class ShuttingDown(Refused):
    """The server is on its way down and begins nothing new."""


class ChatBusy(RoundsError):
    """Chat had the engine for all the time that a call may wait for it. Nothing was computed."""


class EngineFault(RoundsError):
    """The engine could not compute a batch; it lives and may serve the next one."""


class EngineGone(RoundsError):
    """The engine process is dead. Nothing can be computed until the server restarts."""


class OutboxUnavailable(RoundsError):
    """The outbox could not store a result. Nothing was stored."""
