"""What a host has and lacks for serving, proving and verifying, in ten lines."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from proofserve import __version__
from proofserve.lab.host import GIB, HostFacts, free_disk_gib, required_packages
from proofserve.outbox.database import OutboxInUse, hold_lock
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.settings.node import NodeSettings
from proofserve.wiring.access import access_of, description
from proofserve.wiring.start_checks import slow_checks

# A day of a fast node's results takes less than this.
LEAST_DISK_GIB = 2.0
LEAST_MEMORY_GIB = 2.0
# A validator computes in float32, and keeps all weights in memory.
BYTES_A_PARAMETER = 4
EXTRAS = ("reference",)
SERVE, PROVE, VERIFY = "serve", "prove", "verify"


@dataclass(frozen=True, slots=True)
class HostLine:
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


def host_lines(chosen: NodeSettings, facts: HostFacts) -> list[HostLine]:
    return [
        HostLine("proofserve", f"{__version__}, Python {facts.python}, {facts.cores} cores"),
        _packages(facts),
        _torch(facts),
        _cards(facts),
        _memory(facts),
        _vllm(chosen, facts),
        _plugin(facts),
        _outbox(chosen),
        _keys(chosen),
    ]


def verdict(found: Iterable[HostLine]) -> dict[str, bool]:
    """Whether this host can serve, prove and verify."""
    lacking = frozenset[str]().union(*(each.lacking for each in found))
    return {task: task not in lacking for task in (SERVE, PROVE, VERIFY)}


def _all() -> frozenset[str]:
    return frozenset({SERVE, PROVE, VERIFY})


def _packages(facts: HostFacts) -> HostLine:
    if not facts.missing:
        return HostLine("packages", "all that proofserve needs are installed")
    names = " ".join(facts.missing)
    return HostLine("packages", f"missing: {names}", f"pip install {names}", _all())


def _torch(facts: HostFacts) -> HostLine:
    torch = facts.torch
    if torch.version is None:
        return HostLine("torch", "none", "install torch for this host's cards", _all())
    text = f"{torch.version}, CUDA {torch.cuda}" if torch.cuda else f"{torch.version}, without CUDA"
    if torch.problem and "imported" in torch.problem:
        return HostLine("torch", torch.problem, "install torch again", _all())
    if facts.driver_cards and not torch.cuda:
        return HostLine("torch", text, "install torch's CUDA build: this host has a card")
    return HostLine("torch", text)


def _cards(facts: HostFacts) -> HostLine:
    if facts.torch.cards:
        names = ", ".join(
            f"{card.name} ({card.free_gib:.0f} of {card.memory_gib:.0f} GiB free)"
            for card in facts.torch.cards
        )
        return HostLine("cards", names)
    if facts.driver_cards:
        seen = "; ".join(facts.driver_cards)
        return HostLine("cards", f"the driver shows {seen}, and {facts.torch.problem}", "see torch")
    return HostLine("cards", "none: everything runs on the processor, slowly")


def _memory(facts: HostFacts) -> HostLine:
    text = f"{facts.available_gib:.1f} of {facts.memory_gib:.1f} GiB available"
    if facts.available_gib < LEAST_MEMORY_GIB:
        return HostLine("memory", text, f"free {LEAST_MEMORY_GIB:g} GiB", _all())
    billions = (facts.available_gib - LEAST_MEMORY_GIB) * GIB / BYTES_A_PARAMETER / 1e9
    return HostLine("memory", f"{text}; verifies models of up to {billions:.1f}B parameters here")


def _vllm(chosen: NodeSettings, facts: HostFacts) -> HostLine:
    lacking = frozenset({SERVE, PROVE})
    if facts.vllm is None:
        return HostLine(
            "vLLM", "none", "pip install '.[vllm]' in the checkout, to serve and prove", lacking
        )
    if facts.torch.cards and facts.vllm_for_cpu:
        return HostLine("vLLM", f"{facts.vllm}, the build for CPUs", "install vLLM's CUDA build")
    try:
        reason = slow_checks("", chosen, ())["vLLM"]()
    except ValueError as error:
        # It may serve chat; proofs need a version that was vetted.
        unusable = lacking if "imported" in str(error) else frozenset({PROVE})
        return HostLine("vLLM", str(error), "see docs/operations.md", unusable)
    return HostLine("vLLM", reason)


def _plugin(facts: HostFacts) -> HostLine:
    if facts.plugin:
        return HostLine("plugin", "vLLM finds proofserve among its plugins")
    return HostLine(
        "plugin",
        "vLLM would not find proofserve: it is not installed as a package here",
        "pip install --no-deps . in the checkout",
        frozenset({PROVE}),
    )


def _outbox(chosen: NodeSettings) -> HostLine:
    path = chosen.outbox.absolute()
    prove = frozenset({PROVE})
    text, other = f"{path} can be {'used' if path.exists() else 'made'}", "name another: POC_OUTBOX"
    if not path.exists() and not os.access(path.parent, os.W_OK):
        reason = "cannot write there" if path.parent.is_dir() else "there is no such folder"
        return HostLine("outbox", f"{path} cannot be made: {reason}", other, prove)
    if path.exists():
        try:
            hold_lock(path).close()
        except OutboxInUse:
            text = f"{path} belongs to a server that runs now"
        except OutboxUnavailable as error:
            return HostLine("outbox", str(error), other, prove)
        if not os.access(path, os.R_OK | os.W_OK):
            return HostLine("outbox", f"this user cannot read and write {path}", other, prove)
    free = free_disk_gib(path)
    text += f", {free:.1f} GiB free"
    if free < LEAST_DISK_GIB:
        return HostLine("outbox", text, f"free {LEAST_DISK_GIB:g} GiB", prove)
    return HostLine("outbox", text)


def _keys(chosen: NodeSettings) -> HostLine:
    try:
        access = access_of(chosen)
    except ValueError as error:
        return HostLine("keys", str(error), "see docs/operations.md", frozenset({PROVE}))
    if access.names or access.open_to_all:
        return HostLine("keys", description(access))
    return HostLine("keys", description(access), "set POC_API_KEY for calls of other machines")
