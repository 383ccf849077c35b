"""The command line: ``python -m gpu``, which ``make gpu`` runs."""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from gpu import report as reports
from gpu.host import facts_from
from gpu.report import FAILED, PASSED, SKIPPED, RunReport, StepResult, aims_of, headline
from gpu.running import run_step
from gpu.steps import RunOptions, Step, all_steps, lack
from measuring.files import ROOT
from proofserve_lab.facts import HostFacts

MINUTES = 20.0
# Less than this is too little for any step.
LEAST_S = 5.0
HOST_S, PAGE_S = 90.0, 60.0
PAGE = "gpu-report.html"
EXIT_FAILED, EXIT_STOPPED = 1, 130
MARKS = {PASSED: "passed", FAILED: "FAILED", SKIPPED: "skipped"}


class Stopped(BaseException):
    """A signal ended the run; the steps so far keep their results."""


class Run:
    """Runs the steps one after the other and writes the report after each."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Raises SystemExit with code 2 if ``--only`` names no step."""
        self.folder: Path = options.out.absolute()
        self._options = options
        self._run_options = RunOptions(
            device=options.device,
            folder=self.folder,
            scale="short" if options.short else "full",
            model=options.model,
            url=options.url,
        )
        self._steps = all_steps(self._run_options)
        known = [step.name for step in self._steps]
        for name in options.only or ():
            if name not in known:
                text = f"--only: there is no step {name!r}; steps: {' '.join(known)}"
                print(text, file=sys.stderr)
                raise SystemExit(2)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        # By name: those of an earlier run, which this one keeps or replaces.
        self._results = _passed(self.folder) if options.resume else {}
        said = ("device", "short", "model", "minutes")
        self.report = RunReport(
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            options={name: getattr(options, name) for name in said},
            commit=_commit(),
        )

    def run(self) -> None:
        """Every step. Raises Stopped after a signal; the report is written in any case."""
        host, only = self._host(), self._options.only
        if host is not None and not host.torch.cards and self._run_options.device == "cuda":
            _say(
                "no card that torch can use, so all steps are skipped (--device cpu --short: none)"
            )
        steps = [step for step in self._steps if not only or step.name in only]
        for number, step in enumerate(steps, 1):
            place = f"[{number:2}/{len(steps)}]"
            result = self._one(step, place, lack(step, self._run_options, host))
            self._results[step.name] = result
            self._write()
            _say(_line(place, result))
        self.report.finished = True
        self._write()

    def _one(self, step: Step, place: str, lacking: str | None) -> StepResult:
        before = self._results.get(step.name)
        left = 60.0 * self._options.minutes - (time.monotonic() - self._began)
        if lacking is None and before is not None and list(before.command) == list(step.argv):
            return before
        if lacking is None and left < LEAST_S:
            lacking = f"the {self._options.minutes:g} minutes were used up"
        if lacking is not None:
            return StepResult(step.name, step.title, SKIPPED, lacking, command=step.argv)
        return self._run(step, place, left)

    def _run(self, step: Step, place: str, left: float) -> StepResult:
        def waiting(seconds: float) -> None:
            if sys.stdout.isatty():
                print(f"\r{place} {step.name} ... {seconds:.0f} s", end="", flush=True)

        if not sys.stdout.isatty():
            _say(f"{place} {step.name} ...")
        try:
            return run_step(step, self.folder, left, waiting)
        except Stopped:
            self._results[step.name] = StepResult(step.name, step.title, FAILED, "stopped by hand")
            self._write()
            raise

    def _host(self) -> HostFacts | None:
        argv = (sys.executable, "-m", "gpu.host", "--json", str(self.folder / "host.json"))
        step = Step("host", "looking at this host", argv, HOST_S)
        result = self._run(step, "[ 0]", HOST_S)
        self.report.host = result.record
        self._write()
        if result.record is None:
            _say(f"[ 0] host: {result.reason}; no step is skipped for what it may lack")
            return None
        facts = facts_from(result.record)
        torch, vllm = facts.torch, facts.vllm or "none"
        cards = ", ".join(card.name for card in torch.cards) or f"none ({torch.problem})"
        _say(f"cards: {cards}; torch {torch.version}; vLLM {vllm}; {facts.cores} cores")
        return facts

    def _write(self) -> None:
        results = (self._results.get(step.name) for step in self._steps)
        self.report.steps = [result for result in results if result is not None]
        self.report.seconds = round(time.monotonic() - self._began, 1)
        self.report.aims = aims_of(self.report)
        self.report.write(self.folder)


def _passed(folder: Path) -> dict[str, StepResult]:
    """The steps that passed in the report that lies in ``folder``, by name."""
    try:
        found = reports.read(folder / reports.NAME)
    except ValueError:
        return {}
    return {step.name: step for step in found.steps if step.outcome == PASSED}


def _commit() -> str | None:
    """The commit of this checkout, None outside of git."""
    try:
        found = subprocess.run(
            ("git", "-C", str(ROOT), "rev-parse", "HEAD"),
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def _line(place: str, result: StepResult) -> str:
    said = result.reason if result.outcome != PASSED else headline(result)
    after = f" in {result.seconds:.0f} s" if result.seconds else ""
    return f"{place} {result.name}: {MARKS[result.outcome]}{after}{f': {said}' if said else ''}"


def _say(text: str) -> None:
    # On a terminal the line so far shows the seconds of the running step.
    print(f"\r\x1b[K{text}" if sys.stdout.isatty() else text, flush=True)


def _page(folder: Path) -> str:
    """Draw the page, in a process of its own: the JSON must not depend on it."""
    argv = (sys.executable, "-m", "gpu.page", str(folder / reports.NAME), str(folder / PAGE))
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PAGE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no page: drawing it took more than {PAGE_S:.0f} s"
    if done.returncode:
        return f"no page: {done.stderr.strip().splitlines()[-1]}"
    return str(folder / PAGE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpu", description="Measure a host with a GPU.")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the report")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--short", action="store_true", help="tiny sizes: do all steps run at all?")
    parser.add_argument(
        "--model", help="qwen (if unset), llama, gemma, trained, or a folder; with --url the node's"
    )
    parser.add_argument("--url", help="measure this running node instead of starting servers")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="stop after so many")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps alone")
    parser.add_argument("--resume", action="store_true", help="keep what has passed in --out")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 if a step failed; 130 if a signal ended the run."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Stopped

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    run, code = Run(_parser().parse_args(arguments)), 0
    try:
        run.run()
    except Stopped:
        _say("stopped; the report has the steps so far")
        code = EXIT_STOPPED
    _say(f"{run.report.summary}\n{run.folder / reports.NAME}\n{_page(run.folder)}")
    for aim in run.report.aims:
        _say(f"{'reached' if aim['reached'] else 'NOT reached'}: {aim['aim']}: {aim['value']:.4g}")
    return code or (EXIT_FAILED if run.report.count(FAILED) else 0)


if __name__ == "__main__":
    sys.exit(main())
