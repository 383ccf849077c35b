"""vLLM's private names of its command ``vllm serve``, for a server of several API processes.

vLLM's module for one API process can start no more of them, and its command ``vllm`` asks for a
distribution of that name, which the CPU build is not. Run this module with ``python -m`` and the
arguments of ``vllm serve``.
"""

import sys
from collections.abc import Sequence

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from proofserve.engines.vllm.compat_server import argument_steps


def main(argv: Sequence[str]) -> None:
    """Do what ``vllm serve`` does with ``argv``; returns when the server has ended.

    Relies on: ServeSubcommand.subparser_init, .validate and .cmd; ``ArgumentSteps``; cli_env_setup
    choosing that child processes are spawned.
    """
    steps = argument_steps()
    steps.cli_env_setup()
    parser = FlexibleArgumentParser(prog="vllm")
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", *argv])
    steps.configure_logging(args)
    serve.validate(args)
    serve.cmd(args)


if __name__ == "__main__":
    main(sys.argv[1:])
