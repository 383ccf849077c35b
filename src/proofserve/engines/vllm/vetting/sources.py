"""What the source files of a package define, read without importing them.

Importing the modules of vLLM's workers into the API process would take seconds, and attributes
that a constructor sets could not be seen (ADR 29).
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

Scope = dict[str, ast.AST]


class Sources:
    """The modules of a package whose files are in the folder ``package``."""

    def __init__(self, package: Path) -> None:
        self._package = package
        self._scopes: dict[str, Scope | None] = {}
        self._within: dict[ast.AST, Scope] = {}
        self._on_self: dict[ast.AST, frozenset[str]] = {}

    def missing(self, module: str, name: str, has: Sequence[str]) -> tuple[str, ...] | None:
        """Which of ``has`` the function or class ``name`` lacks; None if there is no such name.

        An empty ``name`` stands for the module.
        """
        if module not in self._scopes:
            self._scopes[module] = self._read(module)
        scope, found = self._scopes[module], None
        for part in filter(None, name.split(".")):
            found = (scope or {}).get(part)
            if found is None:
                return None
            scope = self._members(found)
        if scope is None:
            return None
        missing = tuple(each for each in has if each not in scope)
        # The search within methods takes longest, so it is made for what was not found before.
        if missing and isinstance(found, ast.ClassDef):
            return tuple(each for each in missing if each not in self._set_on_self(found))
        return missing

    def _read(self, module: str) -> Scope | None:
        """The names of ``module``, or None if the package does not have it."""
        below = self._package.joinpath(*module.split(".")[1:])
        for file in (below.with_suffix(".py"), below / "__init__.py"):
            if file.is_file():
                # As bytes, of which the parser finds the encoding.
                return dict(_defined(ast.parse(file.read_bytes()).body))
        return None

    def _members(self, found: ast.AST) -> Scope:
        if found not in self._within:
            self._within[found] = _members(found)
        return self._within[found]

    def _set_on_self(self, found: ast.ClassDef) -> frozenset[str]:
        if found not in self._on_self:
            self._on_self[found] = frozenset(_set_on_self(found))
        return self._on_self[found]


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
            case ast.Assign():
                yield from (
                    (name, statement) for each in statement.targets for name in _names(each)
                )
            case ast.AnnAssign():
                yield from ((name, statement) for name in _names(statement.target))
            case ast.If() | ast.Try() | ast.With():
                yield from _defined([*statement.body, *getattr(statement, "orelse", ())])


def _names(target: ast.expr) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _set_on_self(found: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(found):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
