"""Commands that run beside each other, a core for each, and what they last said."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from proofserve.reports import ReportedError
from proofserve.settings.process import environment
from soundness.subjects import FOLDER, ROOT

LOGS: Final = FOLDER / "logs"
# How often a line says what runs.
PROGRESS_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """A command of ``python -m soundness``, and what it needs in its environment.

    Ranks of a server wait for each other on their cores, so they share them with no other job.
    """

    name: str
    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name.replace(' ', '-')}.log"

    def start(self) -> subprocess.Popen[bytes]:
        # A thread that waits for a core which another job has would spin, and vLLM by itself binds
        # the servers of all jobs to the same core.
        usual = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        env = environment({**usual, **self.env})
        argv = (sys.executable, "-m", "soundness", *self.arguments)
        with self.log.open("wb") as out:
            return subprocess.Popen(argv, env=env, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)

    @property
    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "starting"


def run_all(jobs: Sequence[Job], tell: Callable[[str], None]) -> None:
    """Run ``jobs``, as many at once as there are cores. Raises ReportedError for one that fails."""
    LOGS.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    waiting, running, done = [*jobs], dict[str, tuple[Job, subprocess.Popen[bytes]]](), 0
    try:
        while waiting or running:
            while waiting:
                used = sum(job.cores for job, _ in running.values())
                if running and used + waiting[0].cores > cores:
                    break
                job = waiting.pop(0)
                running[job.name] = job, job.start()
            time.sleep(PROGRESS_S)
            said = (f"{name}: {job.last_line}" for name, (job, _) in running.items())
            tell(f"{done} of {len(jobs)} done; {'; '.join(said)}")
            for name, (job, process) in [*running.items()]:
                if (code := process.poll()) is None:
                    continue
                del running[name]
                done += 1
                if code:
                    raise ReportedError(f"{name} ended with {code}: {job.last_line}; see {job.log}")
    finally:
        # Their signal handlers stop the servers that they started.
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()
