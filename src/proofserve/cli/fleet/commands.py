"""``proofserve fleet``: its commands."""

import typer

from proofserve.cli.fleet import members, verdicts
from proofserve.cli.fleet.demo import demo
from proofserve.cli.fleet.serve import serve
from proofserve.cli.fleet.worker import worker

# Without rich's frames, narrow terminals show the names of variables in full.
app = typer.Typer(
    help="Many servers that look like one node: the controller, and its members.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
app.command("serve")(serve)
app.command("worker")(worker)
app.command("members")(members.members)
app.command("cordon")(members.cordon)
app.command("uncordon")(members.uncordon)
app.command("drain")(members.drain)
app.command("remove")(members.remove)
app.command("demo")(demo)
app.command("verdicts")(verdicts.verdicts)
app.command("verify")(verdicts.verify)
