"""Commands of this Python that are steps of a measurement, one at a time or beside each other."""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from measuring.files import ROOT
from measuring.processes import Ended, Process, running
from proofserve.reports import ReportedError
from proofserve.settings.process import environment
from proofserve.wiring.launch import ServerCommand

# A thread that waits for a core which another job has would spin, and vLLM by itself binds the
# servers of all jobs to the same core.
SHARED_CORES: Final = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# How often a line says what runs.
PROGRESS_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """``arguments`` are Python's, ``env`` what the job needs in its environment.

    Ranks of a server wait for each other on their cores, so they share them with no other job.
    """

    name: str
    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1

    def run(self, log: Path, limit_s: float = math.inf) -> Ended:
        with self.running(log) as process:
            return process.wait(limit_s)

    def running(self, log: Path) -> AbstractContextManager[Process]:
        return running((sys.executable, *self.arguments), log, env=self.env, cwd=ROOT)


def proofserve(*options: str, **variables: str) -> ServerCommand:
    """A command of the package, in this process's environment and ``variables``."""
    return ServerCommand((sys.executable, "-m", "proofserve", *options), environment(variables))


def run_all(jobs: Sequence[Job], logs: Path, tell: Callable[[str], None]) -> None:
    """Run ``jobs``, as many at once as there are cores. Raises ReportedError for one that fails."""
    logs.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    waiting, at_work, done = [*jobs], list[tuple[Job, Process]](), 0
    with ExitStack() as stack:
        while waiting or at_work:
            while waiting and (
                not at_work or sum(job.cores for job, _ in at_work) + waiting[0].cores <= cores
            ):
                job = waiting.pop(0)
                job = replace(job, env={**SHARED_CORES, **job.env})
                log = logs / f"{job.name.replace(' ', '-')}.log"
                at_work.append((job, stack.enter_context(job.running(log))))
            time.sleep(PROGRESS_S)
            said = (f"{job.name}: {each.last_line or 'starting'}" for job, each in at_work)
            tell(f"{done} of {len(jobs)} done; {'; '.join(said)}")
            for job, process in [*at_work]:
                if process.code:
                    text = f"{job.name} ended with {process.code}: {process.last_line}"
                    raise ReportedError(f"{text}; see {process.log}")
                if process.code == 0:
                    at_work.remove((job, process))
                    done += 1
