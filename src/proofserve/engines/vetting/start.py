"""What a server checks when it starts: its vLLM, and that every rank has the same proofserve.

A name on which we rely is a pin. Of a version that was not vetted the pins are searched in its
sources without importing them: the modules of vLLM's workers would take seconds in the API process,
and attributes that a constructor sets could not be seen (ADR 29).
"""

import ast
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import vllm

from proofserve.engines.vetting.features import VETTED, Name, Pin, vetting_of
from proofserve.engines.vllm import compat_client
from proofserve.engines.vllm.support import UnsupportedEngine

_logger = logging.getLogger(__name__)

Scope = dict[str, ast.AST]


def require_vetted(allow_unvetted: bool, pins: Sequence[Pin]) -> str:
    """Why the version of the installed vLLM is accepted.

    With ``allow_unvetted`` a version that was not vetted is accepted if its sources define every
    name of ``pins``. Raises UnsupportedEngine with the reason and what to do.
    """
    version = str(vllm.__version__)
    row = vetting_of(version)
    if row is not None:
        return f"version {version} was vetted: {row.how}"
    if not allow_unvetted:
        known = ", ".join(each.minor for each in VETTED)
        raise UnsupportedEngine(
            f"vLLM {version} was not vetted with this release of proofserve (vetted: {known}). "
            "Install a vetted version, start without --enable-poc, or set --poc-unvetted / "
            "POC_UNVETTED=1: proofs then start if this vLLM has every name on which they rely."
        )
    began = time.monotonic()
    # Syntax trees are many objects: Python's collector would take half of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        lost = moved(pins, Sources(Path(vllm.__file__).parent))
    finally:
        if collects:
            gc.enable()
    if lost:
        raise UnsupportedEngine(
            f"vLLM {version} was not vetted, and --poc-unvetted / POC_UNVETTED cannot start it: "
            f"it has {'; '.join(lost)}. Install a vetted version, or start without what needs this."
        )
    seconds = time.monotonic() - began
    found = f"version {version} was not vetted; {len(pins)} pins hold, checked in {seconds:.2f} s"
    _logger.warning("vLLM %s. Verify a round of this server before it earns anything.", found)
    return found


def require_vetted_runner(vllm_config: Any) -> None:
    """Raise UnsupportedEngine for a model runner on which a vetted version was not vetted.

    Relies on: VllmConfig.use_v2_model_runner.
    """
    row = vetting_of(str(vllm.__version__))
    if row is not None and vllm_config.use_v2_model_runner and "V2" not in row.runners:
        raise UnsupportedEngine(
            f"proofs were not vetted on the second model runner of vLLM {row.minor}. Set "
            "VLLM_USE_V2_MODEL_RUNNER=0 (proofserve serve does)."
        )


class Sources:
    """The modules of a package whose files are in the folder ``package``."""

    def __init__(self, package: Path) -> None:
        # Syntax trees are large: what is kept of them ends with this object, which no cycle holds.
        self._scope, self._members = cache(partial(_read, package)), cache(_members)
        self._set_on_self = cache(_set_on_self)

    def missing(self, name: Name) -> tuple[str, ...] | None:
        """Which of what it must have ``name`` lacks; None if there is no such name."""
        scope, found = self._scope(name.module), None
        for part in filter(None, name.name.split(".")):
            found = (scope or {}).get(part)
            if found is None:
                return None
            scope = self._members(found)
        if scope is None:
            return None
        missing = tuple(each for each in name.has if each not in scope)
        # The search within methods takes longest, so it is made for what was not found before.
        if missing and isinstance(found, ast.ClassDef):
            return tuple(each for each in missing if each not in self._set_on_self(found))
        return missing


def _read(package: Path, module: str) -> Scope | None:
    """The names of ``module``, or None if ``package`` does not have it."""
    below = package.joinpath(*module.split(".")[1:])
    for file in (below.with_suffix(".py"), below / "__init__.py"):
        if file.is_file():
            # As bytes, of which the parser finds the encoding.
            return dict(_defined(ast.parse(file.read_bytes()).body))
    return None


def _members(found: ast.AST) -> Scope:
    """The members of a class or the parameters of a function; nothing of anything else."""
    match found:
        case ast.ClassDef():
            return dict(_defined(found.body))
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            given = found.args
            return {each.arg: each for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return {}


def _defined(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """The names that statements define, those under ``if``, ``try`` and ``with`` too."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name, statement
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name, statement) for alias in statement.names)
            case ast.Assign(targets=targets):
                yield from ((name, statement) for each in targets for name in _names(each))
            case ast.AnnAssign(target=target):
                yield from ((name, statement) for name in _names(target))
            case ast.If() | ast.Try() | ast.With():
                yield from _defined([*statement.body, *getattr(statement, "orelse", ())])


def _names(target: ast.expr) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _set_on_self(found: ast.ClassDef) -> frozenset[str]:
    return frozenset(
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def moved(pins: Iterable[Pin], sources: Sources) -> list[str]:
    """A line for each pin of which the sources have no spelling, and the feature it breaks."""
    lines = []
    for pin in pins:
        if any(all(sources.missing(each) == () for each in names) for names in pin.spellings):
            continue
        gone, newest = sources.missing(pin.newest), pin.newest
        place = ".".join(filter(None, (newest.module, newest.name)))
        text = f"no {place}" if gone is None else f"{place} without {', '.join(gone)}"
        lines.append(f"{text}, needed by {pin.feature} ({pin.used_by})")
    return lines


# ruff: noqa: PLC0415 - see ``reporter`` and ``require_equal``


RANKS = "proofserve_ranks"


async def require_equal_ranks(engine_client: Any) -> tuple[str, str | None]:
    """Ask every rank of every core. Blocks while it reads the package's sources.

    Returns what all of them have, in words, and the ``obstacle`` as in a report of ``reporter``.

    Raises EngineFault, by ``require_equal``, if a rank has something else, lacks proofserve
    or does not answer; and EngineGone.
    """
    own = reporter()(None)
    hosts: set[str] = set()
    obstacle = None
    for core in range(compat_client.core_count(engine_client)):
        found = await compat_client.call_engine(engine_client, RANKS, own, core=core)
        hosts.update(found["hosts"])
        obstacle = obstacle or found["obstacle"]
    text = f"{_release_of(own)} on every rank, hosts: {', '.join(sorted(hosts))}"
    return text, obstacle


def require_equal(engine: Any, own: dict[str, Any]) -> dict[str, Any]:
    """The ``hosts`` of all ranks, which must have the proofserve of the API process, ``own``.

    ``obstacle`` is that of the first rank which has one.

    Raises UnsupportedEngine that names each other rank, its host and both versions, or says that a
    rank did not answer; and what the executor raises for a worker that failed.
    """
    # Only for the core: an API process would wait for the imports of vLLM's workers.
    from proofserve.engines.vllm.compat_core import ask_ranks

    ranks = ask_ranks(engine, reporter())
    found = [
        f"rank {each['rank']} on host {each['host']} has {_release_of(each)}, and this server on "
        f"host {own['host']} has {_release_of(own)}."
        for each in ranks
        if (each["version"], each["digest"]) != (own["version"], own["digest"])
    ]
    if found:
        raise UnsupportedEngine(
            f"{' '.join(found)} Install the same release of proofserve in vLLM's environment on "
            "every node, and start the server again."
        )
    obstacle = next((each["obstacle"] for each in ranks if each["obstacle"]), None)
    return {"hosts": sorted({each["host"] for each in ranks}), "obstacle": obstacle}


def _release_of(report: Mapping[str, Any]) -> str:
    if report["version"] is None:
        return "no proofserve"
    return f"proofserve {report['version']} (sources {report['digest'][:12]})"


def reporter() -> Callable[[Any], dict[str, Any]]:
    """A function that takes the worker it runs on, or None, and reports what its process has.

    ``rank`` (None without a worker) and ``host``; ``version`` of proofserve and ``digest`` of all
    its source files, 64 hexadecimal digits, both None if it cannot be imported; ``obstacle`` says
    why a block cannot choose the experts of the model, None if it can.

    It imports what it needs and refers to nothing of this package. So an executor sends it to the
    workers as code, not by name, and it also runs where proofserve is missing.
    """

    def report(worker: Any) -> dict[str, Any]:
        import hashlib
        import socket
        from pathlib import Path

        rank, host = getattr(worker, "rank", None), socket.gethostname()
        found: dict[str, Any] = {"rank": rank, "host": host, "obstacle": None}
        try:
            import proofserve
        except ImportError:
            return {**found, "version": None, "digest": None}
        folder = Path(proofserve.__path__[0])
        digest = hashlib.sha256()
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder).as_posix()
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        found |= {"version": proofserve.__version__, "digest": digest.hexdigest()}
        if (runner := getattr(worker, "model_runner", None)) is not None:
            from proofserve.engines.vllm.compat_worker import obstacle_to_seeded_experts

            found["obstacle"] = obstacle_to_seeded_experts(runner)
        return found

    return report
