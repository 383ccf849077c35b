"""Servers that checks, benchmarks and the demo start and stop."""

import json
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from proofserve.cli.session import CommandSession
from proofserve.engines.vllm.support import ROTATED_BY_PYTORCH
from proofserve.host import ServedDtype, vllm_version
from proofserve.remote.node_client import NodeClient, owed_by
from proofserve.reports import ReportedError
from proofserve.settings.node import ACCESS_VARIABLES
from proofserve.settings.process import has_variable
from proofserve.wiring.experts import asked_experts
from proofserve.wiring.launch import (
    ServerCommand,
    ServerFailed,
    free_port,
    running_server,
    server_command,
)
from proofserve.wiring.sockets import folder_for_sockets

MAX_MODEL_LEN = 2048
MOST_RANKS = 64
# Defaults: the user's own values of these variables take precedence.
SMALL_MACHINE = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

# An option of the demos.
DemoDtype = Annotated[
    ServedDtype | None,
    typer.Option("--dtype", help="Of the servers. Unset: what this processor multiplies quickly."),
]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """A checkpoint, its served name, and how its proofs run on ``ranks`` devices.

    Forwards have ``forward_batch`` nonces, without it as many as chat may wait for. ``scheme`` is
    the only one that the server proves, None for any. ``share`` of the engine's time (0 to 1) goes
    to proofs while chat never pauses; with ``receipts`` every chat answer gets one. Without
    ``eager`` vLLM compiles the model and captures CUDA graphs for chat, which takes a minute more.
    ``vllm_options`` go to vLLM as they are.
    """

    checkpoint: Path
    name: str
    forward_batch: int | None = None
    measure: bool = False
    scheme: str | None = None
    ranks: int = 1
    share: float = 0.0
    receipts: bool = False
    eager: bool = True
    dtype: str = "bfloat16"
    vllm_options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model; each ``start`` gives a node that serves it. ``folder`` is None for one at a URL."""

    name: str
    start: Callable[[], AbstractContextManager[NodeClient]]
    folder: Path | None


def vllm_ranks(name: str) -> int | None:
    """On how many devices to start a vLLM, if ``name`` means one.

    Raises ReportedError for too many.
    """
    ranks = "1" if name == "vllm" else name.removeprefix("vllm:tp")
    if ranks == name or not ranks.isdecimal():
        return None
    if not 1 <= int(ranks) <= MOST_RANKS:
        raise ReportedError(f"{name}: {ranks} ranks are outside 1..{MOST_RANKS}")
    return int(ranks)


def own_model(deployment: ServerOptions, session: CommandSession) -> ServedModel:
    start = partial(serving, deployment, session)
    return ServedModel(deployment.name, start, deployment.checkpoint)


def running_model(
    url: str, api_key: str | None, name: str | None, session: CommandSession
) -> ServedModel:
    with NodeClient(url, api_key) as node, owed_by(url):
        name = name or node.models()[0]
    return ServedModel(name, partial(existing_server, url, api_key, session), None)


def small_server(deployment: ServerOptions, folder: Path) -> ServerCommand:
    """The server of a small model on a small machine; it writes files only in ``folder``."""
    options = (
        *("--served-model-name", deployment.name),
        *("--max-model-len", str(MAX_MODEL_LEN)),
        *("--dtype", deployment.dtype),
        *("--tensor-parallel-size", str(deployment.ranks)),
        *(("--enforce-eager",) if deployment.eager else ()),
        *(ROTATED_BY_PYTORCH if _has_latent_attention_on_a_cpu(deployment.checkpoint) else ()),
        *deployment.vllm_options,
    )
    poc = {
        "POC_ENABLED": "1",
        "POC_FORWARD_BATCH": str(deployment.forward_batch or ""),
        "POC_OUTBOX": str(folder / "outbox.sqlite"),
        "POC_MEASURE": "1" if deployment.measure else "0",
        "POC_RECEIPTS": "1" if deployment.receipts else "0",
        # An empty variable counts as unset.
        "POC_SCHEME": deployment.scheme or "",
        "POC_SHARE": str(deployment.share),
    }
    model = str(deployment.checkpoint)
    asked = asked_experts(model, options, deployment.scheme)
    command = server_command(model, (*options, *asked.options), poc)
    wanted = dict(SMALL_MACHINE)
    if deployment.ranks > 1:
        # vLLM's build for CPUs would run all ranks on the same cores. GPUs ignore it.
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(deployment.ranks)))
    ours = {name: text for name, text in wanted.items() if not has_variable(name)}
    # The server listens only to this machine, so it needs no keys.
    theirs = {n: text for n, text in command.env.items() if n not in ACCESS_VARIABLES}
    # vLLM does not remove its sockets when it is stopped; the folder is removed with them.
    return replace(command, env={**theirs, **ours, "TMPDIR": str(folder)})


def _has_latent_attention_on_a_cpu(checkpoint: Path) -> bool:
    """Whether vLLM's own rotary kernel would compute another model."""
    try:
        config = json.loads((checkpoint / "config.json").read_bytes())
    except OSError:
        # The server says what is wrong with the checkpoint.
        return False
    return bool(config.get("kv_lora_rank")) and "cpu" in (vllm_version() or "")


@contextmanager
def serving(deployment: ServerOptions, session: CommandSession) -> Iterator[NodeClient]:
    """A running server; when the context ends, its processes and files are removed.

    Raises ServerFailed, which names its log; that is kept.
    """
    session.line.step(f"starting vLLM with {deployment.name}, about half a minute")
    with session.interrupts.delayed(), scratch_folder() as folder:
        command, log = small_server(deployment, folder), folder / "server.log"
        try:
            with (
                running_server(command, free_port(), log, session.interrupts.check) as server,
                NodeClient(server.url) as node,
                session.interrupts.allowed(),
            ):
                session.line.step(f"{deployment.name} answers")
                yield node
        except ServerFailed as error:
            kept = Path(tempfile.mkdtemp(prefix="proofserve-failed-")) / log.name
            shutil.copy(log, kept)
            raise ServerFailed(f"{error}\nThe whole log was kept as {kept}") from error


@contextmanager
def existing_server(url: str, api_key: str | None, session: CommandSession) -> Iterator[NodeClient]:
    with NodeClient(url, api_key) as node, session.interrupts.allowed():
        yield node


def running_engine(
    name: str, started: ServerOptions | None, api_key: str | None, session: CommandSession
) -> AbstractContextManager[NodeClient]:
    """The node at a URL, or with a ``name`` as vllm:tp2 one that is started on so many devices."""
    if started is not None and (ranks := vllm_ranks(name)) is not None:
        return serving(replace(started, ranks=ranks), session)
    session.line.step(f"asking {name}")
    return existing_server(name, api_key, session)


def scratch_folder() -> AbstractContextManager[Path]:
    """A temporary folder whose path is short enough for vLLM's sockets."""
    return folder_for_sockets(str(uuid.UUID(int=0)))
