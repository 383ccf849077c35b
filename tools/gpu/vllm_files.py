"""Whether this host's vLLM is whole: its files, those of the packages beside it, and its imports.

Where wheels were carried to a host and unpacked there, a file may be cut off or a package missing.
"""

import csv
import importlib
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from gpu.report import step_parser, write_record
from proofserve.host import vllm_version
from proofserve.wiring.launch import vllm_server

# File names that an error shows.
SHOWN = 5


def damaged(folder: Path) -> Iterator[str]:
    """Files of the packages in ``folder`` that are not there or not as long as their wheel says."""
    for package in metadata.distributions(path=[str(folder)]):
        # Its ``files`` leave out what is not there.
        for name, *_, size in csv.reader((package.read_text("RECORD") or "").splitlines()):
            path = folder / name
            if size and (not path.is_file() or path.stat().st_size != int(size)):
                yield name


def problem(folder: Path, modules: Sequence[str]) -> str | None:
    """Why the vLLM in ``folder`` cannot start a server, which needs ``modules``; None if it can."""
    if wrong := list(damaged(folder)):
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        return (
            f"{folder}: missing or cut off: {', '.join(wrong[:SHOWN])}{more}. Unpack the wheels "
            "again; if they came in parts, check their sums"
        )
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        return f"vLLM in {folder} cannot be imported: {error}"
    return None


def main() -> None:
    options = step_parser(__doc__).parse_args()
    began = time.monotonic()
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        sys.exit("vLLM is not installed")
    # The server imports its workers in processes of their own.
    modules = (vllm_server(), "vllm.v1.worker.gpu_worker")
    if why := problem(Path(found.submodule_search_locations[0]).parent, modules):
        sys.exit(why)
    seconds = {"seconds": round(time.monotonic() - began, 2)}
    write_record(options.json, seconds, setup={"vllm": vllm_version()}, windows={})


if __name__ == "__main__":
    main()
