"""The steps that need a server: ``python -m gpu.served generation|chat|same-batch``.

Each starts a server of its own, or measures the running one at ``--url``, by the same functions as
``proofserve bench``.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu.same_batch import SameBatchPlan, measure_same_batch
from proofserve.cli.model import checkpoint_named
from proofserve.cli.servers import ServerOptions, existing_server, serving
from proofserve.cli.session import EXIT_FAILED, CommandSession, open_session
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve.reports import Progress, Report
from proofserve_lab.bench.chat import Load, bench_chat
from proofserve_lab.bench.command import show
from proofserve_lab.bench.generation import GenerationPlan, bench_generation

# As `proofserve bench generation` on models whose forwards are short.
BUSY = 0.95
SHARE = 0.2
MAX_TOKENS = 16


def generation(
    options: argparse.Namespace, work: Work, node: NodeClient, progress: Progress
) -> Report:
    seconds = options.seconds * options.windows
    return bench_generation(node, GenerationPlan(work, seconds, options.windows, BUSY), progress)


def chat(options: argparse.Namespace, work: Work, node: NodeClient, progress: Progress) -> Report:
    load = Load(options.clients, window_s=options.seconds, pairs=options.windows)
    return bench_chat(node, work, options.chats, MAX_TOKENS, load, progress)


def same_batch(
    options: argparse.Namespace, work: Work, node: NodeClient, progress: Progress
) -> Report:
    windows = options.seconds, options.windows
    plan = SameBatchPlan(work, options.clients, *windows, options.priority)
    return measure_same_batch(node, plan, progress)


KINDS = {"generation": generation, "chat": chat, "same-batch": same_batch}


@contextmanager
def node_of(
    options: argparse.Namespace, session: CommandSession
) -> Iterator[tuple[NodeClient, str]]:
    """The node to measure, and the name of its model."""
    if options.url is not None:
        with existing_server(options.url, None, session) as node:
            yield node, node.models()[0]
        return
    session.line.step(f"writing {options.model}, unless it is there")
    found = checkpoint_named(options.model, options.size)
    apart = options.kind == "same-batch"
    server = ServerOptions(
        found.folder,
        found.name,
        options.batch,
        measure=True,
        share=SHARE if apart else 0.0,
        eager=not options.graphs,
        vllm_options=("--scheduling-policy", "priority") if apart else (),
    )
    with serving(server, session) as node:
        yield node, found.name


def main() -> int:
    """0, or 1 if a figure breaks its limit."""
    options = _parser().parse_args()
    with open_session() as session:
        with node_of(options, session) as (node, name):
            work = Work(name, seq_len=options.seq_len, batch_size=options.batch)
            report = KINDS[options.kind](options, work, node, session.line)
        show(report, options.json, session)
    return 0 if report.passed else EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--url", help="a running node; else a server is started")
    parser.add_argument("--model", default="qwen")
    parser.add_argument("--size", default="0.6b")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs for chat")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=128, help="nonces in a call and a forward")
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window")
    parser.add_argument("--priority", type=int, default=1, help="of prompts beside chat; chat: 0")
    parser.add_argument("--json", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main())
