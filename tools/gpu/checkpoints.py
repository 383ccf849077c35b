"""Writes the small checkpoints that later steps load, so that no step's time pays for them."""

import time

from gpu.report import step_parser, write_record
from proofserve.cli.model import checkpoint_named


def main() -> None:
    parser = step_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("sizes", nargs="+")
    options = parser.parse_args()
    seconds = {}
    for size in dict.fromkeys(options.sizes):
        began = time.monotonic()
        found = checkpoint_named(options.model, size)
        seconds[f"seconds_{found.name}"] = round(time.monotonic() - began, 2)
        print(f"{found.name}: {found.folder}")
    write_record(options.json, seconds, setup={"model": options.model}, windows={})


if __name__ == "__main__":
    main()
