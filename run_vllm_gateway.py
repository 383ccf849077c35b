"""The gateway as a script: ``proofserve gateway`` under another name."""

import sys

from proofserve.cli.main import app

# The engine core of an embedded engine imports this file again, and must not start a gateway.
if __name__ == "__main__":
    app(["gateway", *sys.argv[1:]])
