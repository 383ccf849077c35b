"""Installs a browser for the tests of the dashboard, where the machine has none.

    python3 scripts/browser.py

The tests use the system's Chromium or Chrome through Playwright, which `make setup` installs; no
browser is downloaded from Playwright. This file needs nothing but Python itself.
"""

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Debian's, and Ubuntu's where it is no snap.
STEPS = (("apt-get", "update"), ("apt-get", "install", "--yes", "chromium"))
# For each step, so that a machine without a network does not wait for ever.
LIMIT_S = 180


def found() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def main() -> int:
    if path := found():
        print(f"browser: {path} is there; nothing is installed")
        return 0
    prefix = () if os.geteuid() == 0 else ("sudo", "--non-interactive")
    if shutil.which("apt-get") is None or (prefix and shutil.which("sudo") is None):
        print(
            "browser: this machine has no Chromium, and no apt-get that may install it. Install"
            f" one of {', '.join(NAMES)}; until then the tests in a browser are skipped.",
            file=sys.stderr,
        )
        return 1
    for step in STEPS:
        command = (*prefix, *step)
        print("browser:", " ".join(command), flush=True)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            print(f"browser: that took more than {LIMIT_S} s", file=sys.stderr)
            return 1
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
            return 1
    print(f"browser: installed {found()}")
    return 0 if found() else 1


if __name__ == "__main__":
    sys.exit(main())
