"""What the processes of an engine core do: its own, its workers', and those that compile for them.

The system counts processor time whether a process computes, compiles, or waits for its GPU in a
loop, as CUDA does by default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from proofserve.engines.vllm.liveness.rule import Activity

# Share of one processor that the processes together must have used to count as working: what the
# threads of a process use that only reads its sockets is less.
WORKING_SHARE = 0.1
_STOPPED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
# Waits for a processor or has one: on a crowded machine it may get hardly any time.
_RUNS = psutil.STATUS_RUNNING


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One look at a core's processes: processor time by process id, in seconds, and states."""

    cpu_s: Mapping[int, float] = field(default_factory=dict)
    states: frozenset[str] = frozenset()


def look(process: int) -> ProcessUse:
    """Look at ``process`` and its descendants. It takes milliseconds; nothing if it is gone."""
    cpu_s: dict[int, float] = {}
    states: set[str] = set()
    try:
        own = psutil.Process(process)
        family = [own, *own.children(recursive=True)]
    except psutil.NoSuchProcess:
        return ProcessUse()
    for each in family:
        try:
            with each.oneshot():
                times, state = each.cpu_times(), each.status()
        except psutil.Error:
            continue
        if state != psutil.STATUS_ZOMBIE:
            cpu_s[each.pid] = times.user + times.system
            states.add(state)
    return ProcessUse(cpu_s, frozenset(states))


def activity(before: ProcessUse, after: ProcessUse, process: int, elapsed_s: float) -> Activity:
    """What ``process`` and its descendants did in the ``elapsed_s`` seconds between two looks."""
    if process not in after.cpu_s:
        return Activity.GONE
    if after.states & _STOPPED:
        return Activity.STOPPED
    used_s = sum(
        max(0.0, cpu_s - before.cpu_s.get(each, 0.0)) for each, cpu_s in after.cpu_s.items()
    )
    if _RUNS in after.states or used_s >= WORKING_SHARE * elapsed_s:
        return Activity.WORKING
    return Activity.QUIET
