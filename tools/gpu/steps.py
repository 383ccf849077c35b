"""The steps of ``make gpu`` (``steps.toml``) on a host: what each runs, and what it lacks there."""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from proofserve.engines.vetting.features import vetting_of
from proofserve_lab.facts import HostFacts

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SECOND_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """``device`` is cuda or cpu. ``url`` names a running node instead of servers of our own.

    ``model`` is its checkpoint, or the one that is served; None for a small one of the package.
    """

    device: str
    folder: Path
    scale: Literal["full", "short"] = "full"
    model: str | None = None
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One process; the fields are those of the table."""

    name: str
    title: str
    argv: Sequence[str]
    limit_s: float
    packages: Sequence[str] | None = None
    cards: int = 1
    served: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    finds: tuple[int, ...] = ()


def all_steps(run: RunOptions) -> list[Step]:
    """Every step on ``run.device``, in the order in which they run."""
    of_scale = TABLE[run.scale]
    found = [row for row in TABLE["step"] if run.url is None or not row.get("no_node")]
    return [_step(row, of_scale, run) for row in found]


def _step(row: Mapping[str, Any], of_scale: Mapping[str, Any], run: RunOptions) -> Step:
    name, model = row["name"], run.model or "qwen"
    own = ("--model", model, "--size", of_scale["size"])
    values: dict[str, Sequence[str]] = {
        **{key: text.split() for key, text in of_scale.items() if isinstance(text, str)},
        **{"device": (run.device,), "model": (model,)},
        "json": (str(run.folder / f"{name}.json"),),
        "html": (str(run.folder / f"{name}.html"),),
        "at": own if run.url is None else ("--url", run.url),
        "other": (run.url or row.get("engine", "vllm"),),
    }

    def words(text: str) -> list[str]:
        found = ((word, values.get(word.strip("{}"))) for word in text.split())
        return [
            each
            for word, value in found
            for each in (value if value is not None and word.startswith("{") else (word,))
        ]

    tolerated = name in of_scale.get("finds", ())
    return Step(
        name,
        " ".join(words(row["title"])),
        (sys.executable, *words(row["run"])),
        row["limit_s"],
        row.get("packages"),
        row.get("cards", 1) if run.device == "cuda" else 0,
        row.get("served", False),
        {key: " ".join(words(text)) for key, text in row.get("env", {}).items()},
        (1,) if tolerated else tuple(row.get("finds", ())),
    )


def lack(step: Step, run: RunOptions, host: HostFacts | None) -> str | None:
    """Why ``step`` cannot run on this host; None if it can, or if the host is not known."""
    if host is None:
        return None
    needed = host.missing if step.packages is None else step.packages
    if missing := [name for name in host.missing if name in needed]:
        return f"not installed: {' '.join(missing)}; see docs/gpu.md"
    if step.cards > (cards := len(host.torch.cards)):
        few = f"needs {step.cards} cards, and this host has {cards}"
        return few if cards else f"no card: {host.torch.problem}"
    if step.name == "pick-order" and run.device == "cpu":
        return "a processor's torch.topk has an order of its own, which nothing uses"
    if step.name.startswith("noise-vllm") and run.url is not None and run.model is None:
        return "the node is compared with its checkpoint: name that with --model"
    return _no_server(step, run, host) if step.served and run.url is None else None


def _no_server(step: Step, run: RunOptions, host: HostFacts) -> str | None:
    if host.vllm is None:
        return "vLLM is not installed"
    if run.device == "cuda" and host.vllm_for_cpu:
        return f"vLLM {host.vllm} is a build for processors"
    if step.env == SECOND_RUNNER:
        if run.device == "cpu":
            return "the second model runner needs Triton, which has no compiler for processors"
        row = vetting_of(host.vllm)
        if row is not None and "V2" not in row.runners:
            return f"proofs were not vetted on the second model runner of vLLM {row.minor}"
    if not host.plugin:
        return "vLLM would not load proofserve: it is not installed as a package"
    return None
