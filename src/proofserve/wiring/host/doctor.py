"""What a host has and lacks for serving, proving and verifying, in ten lines."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from proofserve import __version__
from proofserve.lab.host.facts import HostFacts, free_disk_gib, required_packages
from proofserve.outbox.database import OutboxInUse, hold_lock
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.settings.node import NodeSettings
from proofserve.wiring.access import access_of, description
from proofserve.wiring.start_checks import slow_checks

# A day of a fast node's results takes less than this.
LEAST_DISK_GIB = 2.0
LEAST_MEMORY_GIB = 2.0
EXTRAS = ("reference",)
SERVE, PROVE, VERIFY = "serve", "prove", "verify"


@dataclass(frozen=True, slots=True)
class HostFinding:
    """One line: what was found about ``name``, and what to do if it is not enough.

    ``lacking`` are the tasks that this host cannot do for that reason. A ``remedy`` without a task
    is advice.
    """

    name: str
    text: str
    remedy: str | None = None
    lacking: frozenset[str] = frozenset()


def required() -> tuple[str, ...]:
    """The packages that this release needs to serve and to verify, without vLLM."""
    try:
        return required_packages(metadata.requires("proofserve") or (), EXTRAS)
    except metadata.PackageNotFoundError:
        return ()


def findings(chosen: NodeSettings, facts: HostFacts) -> list[HostFinding]:
    return [
        HostFinding("proofserve", f"{__version__}, Python {facts.python}, {facts.cores} cores"),
        _packages(facts),
        _torch(facts),
        _cards(facts),
        _memory(facts),
        _vllm(chosen, facts),
        _plugin(facts),
        _outbox(chosen),
        _keys(chosen),
    ]


def verdict(found: Iterable[HostFinding]) -> dict[str, bool]:
    """Whether this host can serve, prove and verify."""
    lacking = frozenset[str]().union(*(each.lacking for each in found))
    return {task: task not in lacking for task in (SERVE, PROVE, VERIFY)}


def _all() -> frozenset[str]:
    return frozenset({SERVE, PROVE, VERIFY})


def _packages(facts: HostFacts) -> HostFinding:
    if not facts.missing:
        return HostFinding("packages", "all that proofserve needs are installed")
    names = " ".join(facts.missing)
    return HostFinding("packages", f"missing: {names}", f"pip install {names}", _all())


def _torch(facts: HostFacts) -> HostFinding:
    torch = facts.torch
    if torch.version is None:
        return HostFinding("torch", "none", "install torch for this host's cards", _all())
    text = f"{torch.version}, CUDA {torch.cuda}" if torch.cuda else f"{torch.version}, without CUDA"
    if torch.problem and "imported" in torch.problem:
        return HostFinding("torch", torch.problem, "install torch again", _all())
    if facts.driver_cards and not torch.cuda:
        return HostFinding("torch", text, "install torch's CUDA build: this host has a card")
    return HostFinding("torch", text)


def _cards(facts: HostFacts) -> HostFinding:
    if facts.torch.cards:
        names = ", ".join(
            f"{card.name} ({card.free_gib:.0f} of {card.memory_gib:.0f} GiB free)"
            for card in facts.torch.cards
        )
        return HostFinding("cards", names)
    if facts.driver_cards:
        seen = "; ".join(facts.driver_cards)
        return HostFinding(
            "cards", f"the driver shows {seen}, and {facts.torch.problem}", "see torch"
        )
    return HostFinding("cards", "none: everything runs on the processor, slowly")


def _memory(facts: HostFacts) -> HostFinding:
    text = f"{facts.available_gib:.1f} of {facts.memory_gib:.1f} GiB available"
    if facts.available_gib < LEAST_MEMORY_GIB:
        return HostFinding("memory", text, f"free {LEAST_MEMORY_GIB:g} GiB", _all())
    return HostFinding("memory", text)


def _vllm(chosen: NodeSettings, facts: HostFacts) -> HostFinding:
    lacking = frozenset({SERVE, PROVE})
    if facts.vllm is None:
        return HostFinding(
            "vLLM", "none", "pip install '.[vllm]' in the checkout, to serve and prove", lacking
        )
    if facts.torch.cards and facts.vllm_for_cpu:
        return HostFinding("vLLM", f"{facts.vllm}, the build for CPUs", "install vLLM's CUDA build")
    try:
        reason = slow_checks("", chosen, ())["vLLM"]()
    except ValueError as error:
        # It may serve chat; proofs need a version that was vetted.
        unusable = lacking if "imported" in str(error) else frozenset({PROVE})
        return HostFinding("vLLM", str(error), "see docs/operations.md", unusable)
    return HostFinding("vLLM", reason)


def _plugin(facts: HostFacts) -> HostFinding:
    if facts.plugin:
        return HostFinding("plugin", "vLLM finds proofserve among its plugins")
    return HostFinding(
        "plugin",
        "vLLM would not find proofserve: it is not installed as a package here",
        "pip install --no-deps . in the checkout",
        frozenset({PROVE}),
    )


def _outbox(chosen: NodeSettings) -> HostFinding:
    path = chosen.outbox.absolute()
    prove = frozenset({PROVE})
    text, other = f"{path} can be {'used' if path.exists() else 'made'}", "name another: POC_OUTBOX"
    if not path.exists() and not os.access(path.parent, os.W_OK):
        reason = "cannot write there" if path.parent.is_dir() else "there is no such folder"
        return HostFinding("outbox", f"{path} cannot be made: {reason}", other, prove)
    if path.exists():
        try:
            hold_lock(path).close()
        except OutboxInUse:
            text = f"{path} belongs to a server that runs now"
        except OutboxUnavailable as error:
            return HostFinding("outbox", str(error), other, prove)
        if not os.access(path, os.R_OK | os.W_OK):
            return HostFinding("outbox", f"this user cannot read and write {path}", other, prove)
    free = free_disk_gib(path)
    text += f", {free:.1f} GiB free"
    if free < LEAST_DISK_GIB:
        return HostFinding("outbox", text, f"free {LEAST_DISK_GIB:g} GiB", prove)
    return HostFinding("outbox", text)


def _keys(chosen: NodeSettings) -> HostFinding:
    try:
        access = access_of(chosen)
    except ValueError as error:
        return HostFinding("keys", str(error), "see docs/operations.md", frozenset({PROVE}))
    if access.names or access.open_to_all:
        return HostFinding("keys", description(access))
    return HostFinding("keys", description(access), "set POC_API_KEY for calls of other machines")
