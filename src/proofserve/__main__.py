"""``python -m proofserve``: the same commands as ``proofserve``."""

from proofserve.cli.main import app

app()
