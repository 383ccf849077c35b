"""The check of vLLM when a server starts: its version, or every name on which we rely.

A name is a pin. Of a version that was not vetted the pins are searched in its sources without
importing them: the modules of vLLM's workers would take seconds in the API process, and attributes
that a constructor sets could not be seen (ADR 29).
"""

import ast
import gc
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import vllm

from proofserve.engines.vetting.versions import VETTED, vetting_of
from proofserve.engines.vllm.support import UnsupportedEngine

_logger = logging.getLogger(__name__)

Scope = dict[str, ast.AST]


@dataclass(frozen=True, slots=True)
class Name:
    """``name``, dotted, in a ``module`` of vLLM, or the module itself, and what it must have.

    ``has``: parameters of a function, or members of a class: methods, fields and attributes that
    its methods set on ``self``. Members that it inherits belong to the class they are defined in.
    """

    module: str
    name: str
    has: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pin:
    """A name that our function ``used_by`` relies on, in the spelling of the newest version.

    ``feature``: what an operator loses without it; completes "needed by …".
    ``used_by``: ``module.function``, below ``engines.vllm``, ``engines`` or ``proofserve``.
    ``older``: what older versions have in its place, if that differs; they have all of it.
    ``oldest``: the same of versions before those.
    """

    feature: str
    used_by: str
    newest: Name
    older: tuple[Name, ...] = ()
    oldest: tuple[Name, ...] = ()

    @property
    def spellings(self) -> tuple[tuple[Name, ...], ...]:
        """A version has all names of one of them; the newest comes first."""
        return tuple(filter(None, ((self.newest,), self.older, self.oldest)))


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
