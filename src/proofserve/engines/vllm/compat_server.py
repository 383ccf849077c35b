"""vLLM's private names of its command line and its API server.

The application in the caller's own process: the steps and their order are those of ``vllm serve``
with one API process, without those that belong to the caller, the listening socket and the signal
handlers. And, as a program (``python -m`` with the arguments of ``vllm serve``), a server of
several API processes: vLLM's module for one can start no more of them, and its command ``vllm``
asks for a distribution of that name, which the CPU build is not.
"""

import gc
import logging
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

from fastapi import FastAPI
from vllm import logger
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
except ModuleNotFoundError:  # before 0.29
    # A library that it imports raises the root logger's level to ERROR.
    _level = logging.root.level
    from vllm.entrypoints.openai.api_server import (
        build_app,
        build_async_engine_client,
        init_app_state,
    )

    logging.root.setLevel(_level)

# How long a core may take to end after its requests have, seconds.
CORE_EXIT_S = 15.0


# The modules of cli_env_setup, of the parser, and of validate_api_server_args: since 0.33, since
# 0.29, and before.
_OPENAI, _LAUNCHERS = "vllm.entrypoints.openai", "vllm.entrypoints.launchers"
_COMMON, _UTILS = "vllm.entrypoints.common", "vllm.entrypoints.serve.utils.api_utils"
_HOMES: Final = (
    (f"{_COMMON}.startup", f"{_COMMON}.cli_args", f"{_COMMON}.cli_args"),
    (_UTILS, f"{_LAUNCHERS}.cli_args", f"{_LAUNCHERS}.launcher"),
    (_UTILS, f"{_OPENAI}.cli_args", f"{_OPENAI}.api_server"),
)


def argument_steps() -> SimpleNamespace:
    """What vLLM's command line does with its arguments; versions keep it in different modules.

    Raises ModuleNotFoundError if the installed version has no known modules.
    """
    for names in _HOMES:
        with suppress(ModuleNotFoundError):
            setup, arguments, checks = map(import_module, names)
            return SimpleNamespace(
                cli_env_setup=setup.cli_env_setup,
                make_arg_parser=arguments.make_arg_parser,
                configure_logging=logging_step(),
                validate_parsed_serve_args=arguments.validate_parsed_serve_args,
                validate_api_server_args=checks.validate_api_server_args,
            )
    raise ModuleNotFoundError("vLLM's command line lies in none of the modules that are known")


def logging_step() -> Callable[[Namespace], Any]:
    """What applies the arguments about logging; until 0.30 there are none."""
    return getattr(logger, "configure_logging_from_args", lambda _args: None)


def server_arguments(model: str, options: Sequence[str]) -> Namespace:
    """Parse ``options`` as vLLM's command line does, check them and apply their logging.

    Raises what that command line raises: SystemExit for an unknown option, after writing the usage
    to stderr; ValueError, TypeError or KeyError for options that contradict each other.

    Relies on: ``argument_steps``; cli_env_setup choosing that child processes are spawned.
    """
    steps = argument_steps()
    steps.cli_env_setup()
    parser = steps.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    args: Namespace = parser.parse_args(["--model", model, *options])
    steps.configure_logging(args)
    steps.validate_parsed_serve_args(args)
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    steps.validate_api_server_args(args)
    return args


@asynccontextmanager
async def running_app(args: Namespace) -> AsyncIterator[FastAPI]:
    """vLLM's application within its lifespan, on an engine that ends with the context.

    The start, until the model is loaded, and the stop block the event loop. Raises what the
    start raises, with nothing left running.

    Relies on: build_async_engine_client; AsyncLLM.shutdown(timeout) being idempotent; the
    application's lifespan calling gc.freeze.
    """
    async with build_async_engine_client(args) as client:
        try:
            app = await _application(args, client)
            async with app.router.lifespan_context(app):
                yield app
        finally:
            # The lifespan called gc.freeze, so the engine's client would never be collected.
            gc.unfreeze()
            # vLLM would kill the core at once, because its API process ends then too. This process
            # goes on, so it waits until the core has ended its workers and freed their shared
            # memory. Not in another thread: the client's tasks would report the end as a failure.
            client.shutdown(timeout=args.shutdown_timeout + CORE_EXIT_S)


async def _application(args: Namespace, client: Any) -> FastAPI:
    """vLLM's application on a running engine, with the endpoint plugins that it allows.

    Relies on: build_app, init_app_state; ``app.state.server``, which the error handlers tell to
    exit when the engine has died.
    """
    tasks = await client.get_supported_tasks()
    level = logging.root.level
    try:
        app: FastAPI = build_app(args, tasks, client.model_config)
    finally:
        # A library that build_app imports raises the root logger's level to ERROR.
        logging.root.setLevel(level)
    await init_app_state(client, app.state, args, tasks)
    # vLLM would end the process with its engine. Here the caller decides that, by /health.
    app.state.server = SimpleNamespace(should_exit=False)
    return app


def serve_by_several_processes(argv: Sequence[str]) -> None:
    """Do what ``vllm serve`` does with ``argv``; returns when the server has ended.

    Relies on: ServeSubcommand.subparser_init, .validate and .cmd; ``argument_steps``; cli_env_setup
    choosing that child processes are spawned.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand  # noqa: PLC0415 - of this server alone

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
    serve_by_several_processes(sys.argv[1:])
