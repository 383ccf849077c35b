"""What a server needs before vLLM loads its model; each check takes a moment, not minutes.

And what a host has and lacks for serving, proving and verifying, in ten lines.
"""

import os
import socket
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from proofserve import __version__
from proofserve.lab.host import (
    EMULATED,
    GIB,
    HostFacts,
    free_disk_gib,
    quick_dtype,
    required_packages,
)
from proofserve.outbox.database import OutboxInUse, hold_lock
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.settings.node import NodeSettings, require_proofs_for_receipts
from proofserve.wiring.access import (
    CALLBACK_ALLOW,
    access_of,
    description,
    outward_of,
    require_access_rule,
)
from proofserve.wiring.joining import joining_of
from proofserve.wiring.launch import has_several_processes, of_vllm

# vLLM's own default.
PORT = 8000


# Returns what was found; raises ValueError or OutboxUnavailable.
Check = Callable[[], str]


def start_checks(model: str, chosen: NodeSettings, vllm_options: Sequence[str]) -> dict[str, Check]:
    listening = of_vllm(vllm_options)
    return {
        "model": lambda: _model(model),
        "access": lambda: _access(chosen, listening),
        "address": lambda: _address(listening),
        "callbacks": lambda: _callbacks(chosen),
        "outbox": lambda: _outbox(chosen),
        "receipts": lambda: _receipts(chosen, vllm_options),
        "fleet": lambda: _fleet(chosen),
    }


def slow_dtype(model: str, vllm_options: Sequence[str]) -> str | None:
    """What to say if vLLM will serve in a dtype that this processor emulates."""
    # By itself vLLM serves checkpoints in float32 as bfloat16 too.
    if of_vllm(vllm_options).dtype not in ("auto", "bfloat16") or quick_dtype() == "bfloat16":
        return None
    return f"{model} will be served in bfloat16, {EMULATED}"


def slow_checks(model: str, chosen: NodeSettings, vllm_options: Sequence[str]) -> dict[str, Check]:
    """The checks that import vLLM, which takes seconds; vLLM's start makes them as well."""
    return {
        "vLLM": lambda: _version(chosen),
        "vLLM options": lambda: _vllm_options(model, vllm_options),
    }


def _model(model: str) -> str:
    """Refuse a path that does not exist. Only the registry knows whether a name exists."""
    path = Path(model)
    is_path = model.startswith(("/", ".", "~")) or (model.count("/") > 1 and "://" not in model)
    if is_path and not path.exists():
        raise ValueError(f"the model folder {model} does not exist")
    return f"{model} is {'on disk' if path.exists() else 'a name'}"


def _access(chosen: NodeSettings, listening: Namespace) -> str:
    access = access_of(chosen)
    if not chosen.enabled:
        return "the proof endpoints are closed (no --enable-poc)"
    # vLLM alone reads the addresses in a file of options; the plugin checks them.
    if listening.config is None:
        require_access_rule(access, listening.host, listening.uds is not None)
    return description(access)


def _address(listening: Namespace) -> str:
    """Bind the address as vLLM will, and close it again."""
    if listening.uds is not None or listening.config is not None:
        return "a unix socket" if listening.uds is not None else "as the file of options says"
    host, port = listening.host or "", listening.port or PORT
    shown = f"{host or '0.0.0.0'}:{port}"  # noqa: S104 - what vLLM makes of no host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
    except (OSError, OverflowError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no valid port"
        raise ValueError(
            f"cannot listen on {shown}: {reason}; choose another --host or --port"
        ) from error
    return f"{shown} is free"


def _callbacks(chosen: NodeSettings) -> str:
    outward_of(chosen, CALLBACK_ALLOW)
    return f"may go to {', '.join(chosen.callback_allow)}"


def _outbox(chosen: NodeSettings) -> str:
    """Raises OutboxUnavailable as well."""
    path = chosen.outbox
    if not chosen.enabled:
        return "not used"
    hold_lock(path).close()
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise ValueError(f"this user cannot read and write the outbox {path.absolute()}")
    return f"{path.absolute()} {'can be used' if path.exists() else 'can be created'}"


def _receipts(chosen: NodeSettings, vllm_options: Sequence[str]) -> str:
    require_proofs_for_receipts(chosen)
    # vLLM's last lines, after each process has ended, would not show this reason.
    if chosen.receipts and has_several_processes(vllm_options):
        raise ValueError(
            "receipts need a single API process: start with --api-server-count 1 or without"
            " --receipts"
        )
    return f"{chosen.receipts_k_dim} dimensions" if chosen.receipts else "off"


def _fleet(chosen: NodeSettings) -> str:
    joining = joining_of(chosen)
    if joining is None:
        return "joins none"
    if not chosen.enabled:
        raise ValueError("POC_FLEET / --poc-fleet needs POC_ENABLED=1 / --enable-poc")
    return f"joins {joining.fleet} as {joining.name}, at {joining.address}"


def _version(chosen: NodeSettings) -> str:
    try:
        from proofserve.engines.vetting import features, start  # noqa: PLC0415 - imports vLLM
        from proofserve.engines.vllm.support import UnsupportedEngine  # noqa: PLC0415
    except ImportError as error:
        raise ValueError(f"vLLM cannot be imported: {error}") from error
    try:
        wanted = features.of_node(chosen.receipts)
        return start.require_vetted(chosen.unvetted, wanted)
    except UnsupportedEngine as error:
        raise ValueError(str(error)) from error


def _vllm_options(model: str, vllm_options: Sequence[str]) -> str:
    from proofserve.engines.vllm import compat_server  # noqa: PLC0415 - imports vLLM

    try:
        compat_server.server_arguments(model, vllm_options)
    except (SystemExit, KeyError, TypeError) as error:
        raise ValueError(f"vLLM refuses its options: {error}") from error
    return f"{len(vllm_options)} words, which vLLM accepts"


# -- the host --------------------------------------------------------------------------------------

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
    """Whether this host can serve, prove and verify."""
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
