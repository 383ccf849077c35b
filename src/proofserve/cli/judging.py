"""A command whose exit codes are verdicts: nothing else that ends it may look like one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand

# Something could not be understood, read or recomputed.
NO_VERDICT = 3


class VerdictCommand(TyperCommand):
    """Ends with ``NO_VERDICT`` where others end with 2 (usage errors) or 1 (crashes)."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the command line."""
        with _no_verdict():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _no_verdict():
            return super().invoke(ctx)


@contextmanager
def _no_verdict() -> Iterator[None]:
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        # Usage errors carry the code that they end with, and are shown by whoever called us.
        if hasattr(error, "exit_code"):
            error.exit_code = NO_VERDICT
            raise
        Console(stderr=True).print_exception()
        raise typer.Exit(NO_VERDICT) from error
