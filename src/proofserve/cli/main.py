"""``proofserve``: the table of its commands."""

import typer

from proofserve.cli import bench, check, demo, model, receive, serve

app = typer.Typer(
    name="proofserve",
    help="Make an unmodified vLLM server prove its compute in the time that chat leaves free.",
    epilog="Start with `proofserve demo`. Every command explains itself with --help.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    serve.serve
)
app.command("demo")(demo.demo)
app.command("receive")(receive.receive)
app.add_typer(model.app, name="model")
app.add_typer(check.app, name="check")
app.add_typer(bench.app, name="bench")
