"""The rule that tells an engine core that hangs from one that is idle or busy. Pure (ADR 36)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from proofserve.engines.vllm.liveness.memory import CoreRecord, Doing, ServerRecord

# A record that is older was written by a process that is stopped, or too busy to write; seconds.
FRESH_S = 5.0
# The most that one look adds, seconds. A longer pause between two looks says that the process
# which looks was stopped itself, and perhaps the whole container with it.
LONGEST_LOOK_S = 5.0
# A step that uses the processor may take so many times the limit of one that does not.
BUSY_TIMES = 10


class Evidence(Enum):
    """What the processes of a core did between two looks at them."""

    UNKNOWN = "was not looked at yet"
    WORKING = "uses the processor"
    QUIET = "uses no processor time"
    STOPPED = "has a stopped process (SIGSTOP, a debugger, or a frozen container)"
    GONE = "has no process any more"


@dataclass(frozen=True, slots=True)
class Wait:
    """For how long a core has had work without a step, in seconds during which we looked.

    ``waited_s`` counts from its last step, or from when the work came; ``quiet_s`` from the last
    look that found its processes working, at most ``waited_s``.
    """

    steps: float = 0.0
    has_work: bool = False
    waited_s: float = 0.0
    quiet_s: float = 0.0
    evidence: Evidence = Evidence.UNKNOWN

    def is_stalled(self, limit_s: float) -> bool:
        return self.quiet_s >= limit_s or self.waited_s >= BUSY_TIMES * limit_s


def has_work(core: CoreRecord, servers: Sequence[ServerRecord], now: float, waits: bool) -> bool:
    """Whether there is something that the core should step. ``waits``: so it was at the last look.

    A core that runs knows best: a paused scheduler and a client that sends its prompt bit by bit
    leave requests that nothing steps. But a request of which it knows nothing at all was lost on
    the way. A core that does not run is believed what it wrote last, and what the API processes
    say; what it had, it keeps, even if every client has gone.
    """
    asked = sum(each.unfinished for each in servers if now - each.written < FRESH_S)
    if core.doing != Doing.NOTHING or core.work > 0:
        return True
    if now - core.beat < FRESH_S:
        return asked > 0 and core.known == 0
    return asked > 0 or waits


def after_look(
    before: Wait, work: bool, steps: float, evidence: Evidence, elapsed_s: float
) -> Wait:
    """The wait after a look that came ``elapsed_s`` seconds after the one before."""
    if not work or not before.has_work or steps != before.steps:
        return Wait(steps, work)
    elapsed_s = min(elapsed_s, LONGEST_LOOK_S)
    waited_s = before.waited_s + elapsed_s
    quiet_s = 0.0 if evidence is Evidence.WORKING else before.quiet_s + elapsed_s
    return Wait(steps, work, waited_s, quiet_s, evidence)
