"""The table of vetted vLLM versions. ``make matrix`` runs every row live (docs/versions.md)."""

import re
from dataclasses import dataclass
from typing import Literal

Runner = Literal["V1", "V2"]
MATRIX = "live on CPU by `make matrix`, contract tests"


@dataclass(frozen=True, slots=True)
class Vetting:
    """A minor version of vLLM, its model runners on which proofs ran, and how it was vetted."""

    minor: str
    runners: tuple[Runner, ...]
    how: str


# A row is added after `make matrix` has passed for it. docs/versions.md has the results.
VETTED = (
    Vetting("0.26", ("V1",), f"{MATRIX}, with torch 2.11"),
    Vetting("0.29", ("V1",), MATRIX),
    Vetting("0.30", ("V1",), MATRIX),
    Vetting("0.31", ("V1",), MATRIX),
    Vetting("0.32", ("V1", "V2"), f"{MATRIX}; on V1 every test of `make test`"),
    Vetting("0.33", ("V1", "V2"), f"{MATRIX}, with the libraries of 0.32's CPU build"),
)


def vetting_of(version: str) -> Vetting | None:
    """The row of a version such as ``0.32.1`` or ``0.32.0rc1+cpu``; None if it has none."""
    minor = re.match(r"\d+\.\d+", version)
    return next((row for row in VETTED if minor and row.minor == minor[0]), None)
