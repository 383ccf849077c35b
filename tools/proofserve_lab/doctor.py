"""``proofserve doctor``: whether this host can serve, prove and verify, and what is missing."""

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from proofserve import __version__
from proofserve.cli.command import Json
from proofserve.cli.session import EXIT_ERROR, EXIT_FAILED, ProgressLine
from proofserve.host import GIB
from proofserve.outbox.database import OutboxInUse, hold_lock
from proofserve.reports import write_json
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.settings.node import NodeSettings
from proofserve.wire.records import first_problem
from proofserve.wiring.access import access_of, description
from proofserve.wiring.start_checks import slow_checks
from proofserve_lab.facts import HostFacts, free_disk_gib, host_facts, required_packages

app = typer.Typer()
COLUMN = 11
# A day of a fast node's results takes less than this.
LEAST_DISK_GIB = 2.0
LEAST_MEMORY_GIB = 2.0
# A validator holds one layer in float32, a changed copy of it, and what the change takes.
BYTES_A_PARAMETER = 12
EXTRAS = ("reference",)
# A dtype that is slower than float32 by more than this is emulated.
EMULATED_TIMES = 4
SERVE, PROVE, VERIFY = "serve", "prove", "verify"
EVERYTHING = frozenset({SERVE, PROVE, VERIFY})


@app.command("doctor")
def command(json: Json = None) -> None:
    """Say in ten lines whether this host can serve, prove and verify.

    It looks at packages, torch, cards, memory, vLLM, its plugins, the outbox
    and the keys, as the variables POC_... say. It starts nothing and changes
    nothing. Exit code 0: all three. 1: not all. 2: a variable is not valid.

    \b
    proofserve doctor
    POC_OUTBOX=/data/outbox.sqlite proofserve doctor --json doctor.json
    """
    console = Console()
    try:
        chosen = NodeSettings()
    except ValidationError as error:
        field, message = first_problem(error)
        console.print(f"POC_{field.partition('.')[0].upper()}: {message}", markup=False)
        raise typer.Exit(EXIT_ERROR) from error
    with ProgressLine(console) as line:
        # A first import of torch may take a minute.
        line.step("looking at this host")
        facts = host_facts(required())
        found = host_lines(chosen, facts)
    able = verdict(found)
    for each in found:
        said = Text(f"{each.name:{COLUMN}}")
        said.append(each.text, style="red" if each.lacking else "")
        if each.remedy is not None:
            said.append(f" -> {each.remedy}", style="yellow")
        console.print(said, soft_wrap=True)
    last = Text(f"{'this host':{COLUMN}}")
    for number, (task, can) in enumerate(able.items()):
        last.append(", " if number else "")
        words = f"can {task}" if can else f"cannot {task}"
        last.append(words, style="bold green" if can else "bold red")
    console.print(last, soft_wrap=True)
    if json is not None:
        lines = [{**asdict(each), "lacking": sorted(each.lacking)} for each in found]
        write_json(json, {"can": able, "findings": lines, "facts": asdict(facts)})
    raise typer.Exit(0 if all(able.values()) else EXIT_FAILED)


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
        _packages_line(facts),
        _torch_line(facts),
        _cards_line(facts),
        _memory_line(facts),
        _vllm_line(chosen, facts),
        _plugin_line(facts),
        _outbox_line(chosen),
        _keys_line(chosen),
    ]


def verdict(found: Iterable[HostLine]) -> dict[str, bool]:
    lacking = frozenset[str]().union(*(each.lacking for each in found))
    return {task: task not in lacking for task in (SERVE, PROVE, VERIFY)}


def _packages_line(facts: HostFacts) -> HostLine:
    if not facts.missing:
        return HostLine("packages", "all that proofserve needs are installed")
    names = " ".join(facts.missing)
    return HostLine("packages", f"missing: {names}", f"pip install {names}", EVERYTHING)


def _torch_line(facts: HostFacts) -> HostLine:
    torch = facts.torch
    if torch.version is None:
        return HostLine("torch", "none", "install torch for this host's cards", EVERYTHING)
    text = f"{torch.version}, CUDA {torch.cuda}" if torch.cuda else f"{torch.version}, without CUDA"
    if torch.problem and "imported" in torch.problem:
        return HostLine("torch", torch.problem, "install torch again", EVERYTHING)
    if facts.driver_cards and not torch.cuda:
        return HostLine("torch", text, "install torch's CUDA build: this host has a card")
    return HostLine("torch", text)


def _cards_line(facts: HostFacts) -> HostLine:
    if facts.torch.cards:
        names = ", ".join(
            f"{card.name} ({card.free_gib:.0f} of {card.memory_gib:.0f} GiB free)"
            for card in facts.torch.cards
        )
        return HostLine("cards", names)
    if facts.driver_cards:
        seen = "; ".join(facts.driver_cards)
        return HostLine("cards", f"the driver shows {seen}, and {facts.torch.problem}", "see torch")
    rates = {name: round(rate) for name, rate in facts.matrix_rates.items()}
    shown = ", ".join(f"{name} {rate}" for name, rate in rates.items())
    text = f"none: everything runs on the processor, slowly ({shown or 'unknown'} GFLOP/s)"
    if rates and rates["bfloat16"] * EMULATED_TIMES < rates["float32"]:
        return HostLine("cards", text, "serve with --dtype float32: bfloat16 is emulated here")
    return HostLine("cards", text)


def _memory_line(facts: HostFacts) -> HostLine:
    text = f"{facts.available_gib:.1f} of {facts.memory_gib:.1f} GiB available"
    if facts.available_gib < LEAST_MEMORY_GIB:
        return HostLine("memory", text, f"free {LEAST_MEMORY_GIB:g} GiB", EVERYTHING)
    billions = (facts.available_gib - LEAST_MEMORY_GIB) * GIB / BYTES_A_PARAMETER / 1e9
    return HostLine(
        "memory", f"{text}; verifies models whose layers have up to {billions:.1f}B parameters each"
    )


def _vllm_line(chosen: NodeSettings, facts: HostFacts) -> HostLine:
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


def _plugin_line(facts: HostFacts) -> HostLine:
    if facts.plugin:
        return HostLine("plugin", "vLLM finds proofserve among its plugins")
    return HostLine(
        "plugin",
        "vLLM would not find proofserve: it is not installed as a package here",
        "pip install --no-deps . in the checkout",
        frozenset({PROVE}),
    )


def _outbox_line(chosen: NodeSettings) -> HostLine:
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


def _keys_line(chosen: NodeSettings) -> HostLine:
    try:
        access = access_of(chosen)
    except ValueError as error:
        return HostLine("keys", str(error), "see docs/operations.md", frozenset({PROVE}))
    if access.names or access.open_to_all:
        return HostLine("keys", description(access))
    return HostLine("keys", description(access), "set POC_API_KEY for calls of other machines")
