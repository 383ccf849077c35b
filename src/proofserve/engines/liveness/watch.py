"""An API process says what it has asked of the cores, looks at them, and tells which ones hang.

The rule that decides (ADR 36) is ``is_asked``, ``has_work`` and ``after_look``: pure functions.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import psutil

from proofserve.engines.liveness.memory import (
    CoreMemory,
    CoreRecord,
    Doing,
    MemoryAddress,
    ServerRecord,
)
from proofserve.rounds.status import CoreLiveness

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
    return any(unfinished > 0 and now - written < FRESH_S for written, unfinished in servers)


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


def after_look(before: Wait, found: Wait, elapsed_s: float) -> Wait:
    """The wait after a look that came ``elapsed_s`` seconds after the one before.

    ``found`` is what that look alone says, without the seconds before it.
    """
    if not found.has_work or not before.has_work or found.steps != before.steps:
        return Wait(found.steps, found.has_work, found.has_work and found.asked)
    elapsed_s = min(elapsed_s, LONGEST_LOOK_S)
    works = found.activity is Activity.WORKING
    return replace(
        found,
        asked=before.asked or found.asked,
        waited_s=before.waited_s + elapsed_s,
        quiet_s=0.0 if works else before.quiet_s + elapsed_s,
    )


_logger = logging.getLogger(__name__)

# Seconds between two looks.
LOOK_S = 0.5
# A wait that is shorter needs no look at processes, which costs milliseconds.
SHORT_S = 1.0
# Share of one processor that the processes together must have used to count as working: what the
# threads of a process use that only reads its sockets is less.
WORKING_SHARE = 0.1
_STOPPED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
_IN = {
    Doing.NOTHING: "between two steps",
    Doing.CHAT: "in a step of chat",
    Doing.PROOF: "in a proof forward",
}


# One look at a core's processes: of each, by its id, the processor time in seconds, and the state.
ProcessUse = Mapping[int, tuple[float, str]]


@dataclass(slots=True)
class CoreView:
    """A core and what the last looks found. ``use`` is from ``used_at``, None before the first."""

    index: int
    address: MemoryAddress
    memory: CoreMemory
    wait: Wait = field(default_factory=Wait)
    use: ProcessUse | None = None
    used_at: float = 0.0
    seen: CoreLiveness = field(init=False)

    def __post_init__(self) -> None:
        self.seen = CoreLiveness(self.index)


class LivenessWatch:
    """Watches ``cores``; None stands for one whose memory this process cannot read.

    ``unfinished``: how much this process has asked of each core and not got back. ``limit_s``: the
    seconds without a step after which a core with work is stalled.
    """

    def __init__(
        self,
        cores: Sequence[CoreView | None],
        unfinished: Callable[[], Sequence[int]],
        limit_s: float,
    ) -> None:
        self._cores = list(cores)
        self._unfinished = unfinished
        self._limit_s = limit_s
        self._looked_at = time.monotonic()

    def read(self) -> tuple[CoreLiveness, ...]:
        """What the last look saw, at most ``LOOK_S`` ago while ``run`` runs."""
        return tuple(
            CoreLiveness(index, watched=False) if core is None else core.seen
            for index, core in enumerate(self._cores)
        )

    async def run_counts(self) -> None:
        """Tell the cores' watchers what this process waits for. For every API process."""
        while True:
            now = time.monotonic()
            for core, count in zip(self._cores, self._unfinished(), strict=True):
                if core is not None:
                    core.memory.write_server(core.address.place, (now, count))
            await asyncio.sleep(LOOK_S)

    async def run(self) -> None:
        """Look at the cores for ever. For the API process that owns the node."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        now = time.monotonic()
        elapsed_s, self._looked_at = now - self._looked_at, now
        for core in self._cores:
            if core is None:
                continue
            record, now = core.memory.read(), time.monotonic()
            asked = is_asked(core.memory.servers(), now)
            found = Wait(record.steps, has_work(record, asked, now, core.wait), asked)
            if found.has_work and found.steps == core.wait.steps and core.wait.waited_s >= SHORT_S:
                found = replace(found, activity=await self._activity(core))
            else:
                core.use = None
            core.wait = after_look(core.wait, found, elapsed_s)
            before, core.seen = core.seen, self._seen(core, Doing(int(record.doing)))
            if core.seen.stalled and not before.stalled:
                _logger.error("%s; restart the server if it does not go on", core.seen.reason)
            elif before.stalled and not core.seen.stalled:
                text = "engine core %d goes on, %.0f s after its last step"
                _logger.warning(text, core.index, before.waited_s)

    async def _activity(self, core: CoreView) -> Activity:
        process, before, used_at = core.address.process, core.use, core.used_at
        core.used_at = time.monotonic()
        core.use = await asyncio.to_thread(process_use, process)
        if before is None:
            return Activity.UNKNOWN
        return activity_between(before, core.use, process, core.used_at - used_at)

    def _seen(self, core: CoreView, doing: Doing) -> CoreLiveness:
        wait = core.wait
        stalled = wait.is_stalled(self._limit_s)
        how = str(wait.activity.value)
        if wait.activity is Activity.WORKING:
            how += f", but for {BUSY_TIMES} times POC_ENGINE_STALL_SEC"
        reason = (
            f"engine core {core.index} (process {core.address.process}) has work and has not "
            f"stepped for {wait.waited_s:.0f} s: it {how}, {_IN[doing]}"
        )
        return CoreLiveness(
            core=core.index,
            doing=doing.name.lower(),
            steps=int(wait.steps),
            waited_s=wait.waited_s,
            stalled=stalled,
            reason=reason if stalled else None,
        )


def process_use(process: int) -> ProcessUse:
    """Look at ``process`` and its descendants: its own, its workers', and those that compile.

    The system counts processor time whether a process computes, compiles, or waits for its GPU in a
    loop, as CUDA does by default. It takes milliseconds; nothing if ``process`` is gone.
    """
    use: dict[int, tuple[float, str]] = {}
    try:
        own = psutil.Process(process)
        family = [own, *own.children(recursive=True)]
    except psutil.NoSuchProcess:
        return use
    for each in family:
        try:
            with each.oneshot():
                times, state = each.cpu_times(), each.status()
        except psutil.Error:
            continue
        if state != psutil.STATUS_ZOMBIE:
            use[each.pid] = times.user + times.system, state
    return use


def activity_between(
    before: ProcessUse, after: ProcessUse, process: int, elapsed_s: float
) -> Activity:
    """What ``process`` and its descendants did in the ``elapsed_s`` seconds between two looks."""
    if process not in after:
        return Activity.GONE
    states = {state for _, state in after.values()}
    if states & _STOPPED:
        return Activity.STOPPED
    earlier_s = {each: cpu_s for each, (cpu_s, _) in before.items()}
    used_s = sum(max(0.0, cpu_s - earlier_s.get(each, 0.0)) for each, (cpu_s, _) in after.items())
    # A process that waits for a processor runs too: a crowded machine may give it hardly any time.
    if psutil.STATUS_RUNNING in states or used_s >= WORKING_SHARE * elapsed_s:
        return Activity.WORKING
    return Activity.QUIET
