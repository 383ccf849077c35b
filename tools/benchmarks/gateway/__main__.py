"""The command line: ``python -m benchmarks.gateway``."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.gateway import contestants, report, scenarios
from benchmarks.gateway.contestants import Unusable
from benchmarks.gateway.readings import judge
from benchmarks.gateway.rounds import Bench, Plan, build, starts_missing
from measuring.files import CACHE as CACHES
from proofserve.cli.session import ProgressLine

CACHE = CACHES / "gateway-bench"
LOG_WIDTH = 130
EPILOGUE = Path(__file__).with_name("help.txt")


def _parser() -> argparse.ArgumentParser:
    names = ", ".join(contestant.name for contestant in contestants.CONTESTANTS)
    loads = "\n  ".join(
        f"{scenario.name:16}{scenario.meaning}"
        for scenario in (*scenarios.SCENARIOS, scenarios.LONG)
    )
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway",
        description="Compare the speed of this gateway with nginx, the Rust routers and others.",
        epilog=EPILOGUE.read_text().format(contestants=names, scenarios=loads),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="how often each contestant runs (default 3)")
    add("--seconds", type=float, default=8.0, help="length of one measurement (default 8)")
    add("--only", type=_words, default=(), help="only scenarios whose names begin with these words")
    add("--contestants", type=_words, default=(), help="the contestants to run (default: all)")
    add("--long", action="store_true", help="also run five minutes of streaming")
    add("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    add(
        "--cores",
        type=_words,
        default=(),
        help="two numbers: core of the load, core of the gateway",
    )
    add(
        "--cache",
        type=Path,
        default=CACHE,
        help="folder for programs and contestants (default %(default)s)",
    )
    return parser


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _cores(asked: Sequence[str]) -> tuple[int, int]:
    if shutil.which("taskset") is None:
        raise Unusable("taskset is needed to give the gateway a core: apt install util-linux")
    ours = sorted(os.sched_getaffinity(0))
    cores = [int(core) for core in asked if core.isdigit()] if asked else ours[:2]
    if len(cores) != 2 or not set(cores) <= set(ours):
        raise Unusable(f"two of the cores {ours} are needed: of the load, and of the gateway")
    return cores[0], cores[1]


def _plan(options: argparse.Namespace) -> Plan:
    load_core, gateway_core = _cores(options.cores)
    return Plan(
        contestants=contestants.chosen(options.contestants),
        scenarios=scenarios.chosen(options.only, options.long),
        rounds=options.rounds,
        seconds=options.seconds,
        load_core=load_core,
        gateway_core=gateway_core,
        cache=options.cache,
    )


def main() -> int:
    options = _parser().parse_args()
    # As wide as the tables if the output is a file.
    console = Console(width=None if Console().is_terminal else LOG_WIDTH)
    try:
        plan = _plan(options)
        mock, load = build(plan.cache / "bin")
        with ProgressLine(console) as line:
            results = Bench(plan, mock, load, line).run()
    except Unusable as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 2
    judged = tuple(judge(results))
    for table in report.tables(results, plan, judged):
        console.print(table)
    document = report.document(results, plan, judged)
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0 if document["passed"] and not starts_missing(results, plan) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
