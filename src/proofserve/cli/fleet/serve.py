"""``proofserve fleet serve``: its options are the settings of a controller."""

import inspect
import logging
from typing import Any

import typer

from proofserve.cli.serve import SettingOptions
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.settings.fleet import FleetSettings

FLEET_OPTIONS = SettingOptions(FleetSettings, lambda name: f"--{name.replace('_', '-')}")
# The exit code of a controller that did not start.
REFUSED = 2


def serve(**given: Any) -> None:
    """Answer as one node for many: rounds, jobs and results of all members.

    \b
    proofserve fleet serve --member http://a:8000 --member http://b:8000
    proofserve fleet serve --dns http://nodes.default.svc:8000 --public-url http://fleet:7100 \\
      --database postgresql://fleet@db/fleet --host 0.0.0.0

    A network uses http://HOST:PORT/api/v1/pow as it would use a node's. Members must be able
    to reach --public-url, and must allow it (their --poc-callback-allow). After SIGTERM rounds
    go on at the members; the next start, or another controller, takes them over.
    """
    try:
        # Only the controller needs these libraries; `fleet members` works without.
        from proofserve.wiring.fleet import run_fleet  # noqa: PLC0415
    except ModuleNotFoundError as error:
        typer.echo(f"{error.name} is not installed: pip install 'proofserve[fleet]'", err=True)
        raise typer.Exit(REFUSED) from error
    chosen = FLEET_OPTIONS.chosen(given)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # One line for each callback would be too many.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        run_fleet(chosen)
    except (ValueError, OSError, OutboxUnavailable) as error:
        typer.echo(f"proofserve fleet serve: {error}", err=True)
        raise typer.Exit(REFUSED) from error


serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    FLEET_OPTIONS.parameters()
)
