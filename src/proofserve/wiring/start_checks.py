"""What a server needs before vLLM loads its model; each check takes a moment, not minutes."""

import os
import socket
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from proofserve.host import EMULATED, quick_dtype
from proofserve.outbox.database import hold_lock
from proofserve.settings.node import NodeSettings, require_proofs_for_receipts
from proofserve.wiring.access import (
    CALLBACK_ALLOW,
    access_of,
    description,
    outward_of,
    require_access_rule,
)
from proofserve.wiring.experts import asked_experts
from proofserve.wiring.joining import joining_of
from proofserve.wiring.launch import has_several_processes, of_vllm

# vLLM's own default.
PORT = 8000


# Returns what was found; raises ValueError or OutboxUnavailable.
Check = Callable[[], str]


def start_checks(
    model: str, chosen: NodeSettings, vllm_options: Sequence[str], capability: str | None = None
) -> dict[str, Check]:
    """``capability``: of the card that will serve; unset, this machine's."""
    listening = of_vllm(vllm_options)
    return {
        "model": lambda: _model(model),
        "access": lambda: _access(chosen, listening),
        "address": lambda: _address(listening),
        "callbacks": lambda: _callbacks(chosen),
        "outbox": lambda: _outbox(chosen),
        "receipts": lambda: _receipts(chosen, vllm_options),
        "fleet": lambda: _fleet(chosen),
        "experts": lambda: str(asked_experts(model, vllm_options, chosen.scheme, capability)),
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
