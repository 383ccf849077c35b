"""The rule that tells an engine core that hangs from one that is idle or busy. Pure (ADR 36)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from proofserve.engines.liveness.memory import CoreRecord, Doing, ServerRecord

# A record that is older was written by a process that is stopped, or too busy to write; seconds.
FRESH_S = 3.0
# The most that one look adds, seconds. A longer pause between two looks says that the process
# which looks was stopped itself, and perhaps the whole container with it.
LONGEST_LOOK_S = 5.0
# A step that uses the processor may take so many times the limit of one that does not.
BUSY_TIMES = 10


class Activity(Enum):
    """What the processes of a core did between two looks at them."""

    UNKNOWN = "was not looked at yet"
    WORKING = "uses the processor"
    QUIET = "uses no processor time"
    STOPPED = "has a stopped process (SIGSTOP, a debugger, or a frozen container)"
    GONE = "has no process any more"


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a core found. ``asked``: an API process waits for an answer of it."""

    steps: float
    work: bool
    asked: bool
    activity: Activity = Activity.UNKNOWN


@dataclass(frozen=True, slots=True)
class Wait:
    """For how long a core has had work without a step, in seconds during which we looked.

    ``waited_s`` counts from its last step, or from when the work came; ``quiet_s`` from the last
    look that found its processes working, at most ``waited_s``. ``asked``: in this time an API
    process waited for an answer of it.
    """

    steps: float = 0.0
    has_work: bool = False
    asked: bool = False
    waited_s: float = 0.0
    quiet_s: float = 0.0
    activity: Activity = Activity.UNKNOWN

    def is_stalled(self, limit_s: float) -> bool:
        """Whether it hangs. What its processes do must be known: no limit is too short for that."""
        if self.activity is Activity.UNKNOWN:
            return False
        return self.quiet_s >= limit_s or self.waited_s >= BUSY_TIMES * limit_s


def is_asked(servers: Sequence[ServerRecord], now: float) -> bool:
    """Whether an API process that lives waits for an answer."""
    return any(each.unfinished > 0 and now - each.written < FRESH_S for each in servers)


def has_work(core: CoreRecord, asked: bool, now: float, before: Wait) -> bool:
    """Whether there is something that the core should step.

    A core that runs knows best: a paused scheduler and a client that sends its prompt bit by bit
    leave requests that nothing steps. But a request of which it knows nothing at all was lost on
    the way. A core that does not run may have ended its work after it last wrote how much there
    was. So it has what the API processes wait for, or have waited for since it stopped: their
    clients may have gone meanwhile.
    """
    if core.doing != Doing.NOTHING:
        return True
    if now - core.beat < FRESH_S:
        return core.work > 0 or (asked and core.known == 0)
    return asked or before.asked


def after_look(before: Wait, look: Look, elapsed_s: float) -> Wait:
    """The wait after a look that came ``elapsed_s`` seconds after the one before."""
    if not look.work or not before.has_work or look.steps != before.steps:
        return Wait(look.steps, look.work, look.work and look.asked)
    elapsed_s = min(elapsed_s, LONGEST_LOOK_S)
    quiet_s = 0.0 if look.activity is Activity.WORKING else before.quiet_s + elapsed_s
    return Wait(
        steps=look.steps,
        has_work=True,
        asked=before.asked or look.asked,
        waited_s=before.waited_s + elapsed_s,
        quiet_s=quiet_s,
        activity=look.activity,
    )
