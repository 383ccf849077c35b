"""Where the repository lies, and files that are written whole or not at all.

Like ``processes`` this needs no package: ``python -m gpu`` runs on bare hosts.
"""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
CACHE: Final = ROOT / ".cache"
DOCS: Final = ROOT / "docs"


def write_whole(file: Path, text: str) -> None:
    """A program that is stopped meanwhile leaves the old file, or none."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
