"""Looks at this host and writes what it found: a step of its own, since torch may not load."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gpu.report import step_parser
from measuring.files import ROOT
from proofserve_lab.facts import Card, HostFacts, TorchFacts, host_facts, required_packages

PYPROJECT = ROOT / "pyproject.toml"
EXTRAS = ("reference", "models")
# Beside what proofserve itself requires.
TESTS = ("pytest",)


def required() -> tuple[str, ...]:
    """The packages that the steps need, vLLM apart, by pyproject.toml."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in EXTRAS for line in extras[name])]
    return tuple(dict.fromkeys((*required_packages(lines), *TESTS)))


def facts_from(record: Mapping[str, Any]) -> HostFacts:
    """The facts in a record that ``main`` wrote. Raises KeyError or TypeError for another one."""
    torch = record["torch"]
    cards = tuple(Card(**card) for card in torch["cards"])
    lists = {name: tuple(record[name]) for name in ("driver_cards", "missing")}
    return HostFacts(**{**record, "torch": TorchFacts(**{**torch, "cards": cards}), **lists})


def main() -> None:
    options = step_parser(__doc__).parse_args()
    record = asdict(host_facts(required()))
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
