"""Commands whose options are declared once: by the fields of a record, or of settings.

Below are the options that several commands share.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args, get_origin, get_type_hints

import annotated_types as bounds
import typer
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from typer.core import TyperCommand
from typer.models import ParameterInfo

from proofserve.cli.session import (
    EXIT_ERROR,
    EXIT_NO_VERDICT,
    CommandSession,
    VerdictCommand,
    open_session,
)
from proofserve.reports import ReportedError
from proofserve.wire.records import first_problem

S = TypeVar("S", bound=BaseSettings)
C = TypeVar("C", bound=Callable[..., None])
O = TypeVar("O", bound="CommandOptions")  # noqa: E741
# Fields that name a file which a command writes at its end.
_WRITTEN = ("bundle", "html", "json_file", "out", "png", "save")
# What a command does with its options; it returns its exit code, None for 0.
Action = Callable[[O, CommandSession], int | None]


class CommandOptions(BaseModel):
    """What a command is given: each field is an option, its docstring the help, its limits those.

    A field that needs more, such as a variable or another name, has a ``typer.Option`` or a
    ``typer.Argument``. Groups of options that commands share are bases of their records; ``panel``
    is the heading of a group in the help.
    """

    model_config = ConfigDict(
        frozen=True,
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
        hide_input_in_errors=True,
    )
    panel: ClassVar[str | None] = None

    def __repr__(self) -> str:
        # Some options are keys.
        return f"{type(self).__name__}(...)"


def command(
    app: typer.Typer,
    name: str,
    *,
    exit_code: int = EXIT_ERROR,
    cls: type[TyperCommand] = TyperCommand,
) -> Callable[[Action[O]], Action[O]]:
    """Make a function a command of ``app``, with the options of its first parameter's record.

    Expected errors end it with ``exit_code``. A signal may end it at any time, but for the starts
    and ends of servers.
    """

    def add(action: Action[O]) -> Action[O]:
        record = next(iter(get_type_hints(action).values()))

        def run(**given: Any) -> None:
            with open_session(exit_code) as session, session.interrupts.allowed():
                code = action(_writable(_chosen(record, given)), session)
            raise typer.Exit(code or 0)

        run.__doc__ = action.__doc__
        run.__signature__ = inspect.Signature([*_parameters(record)])  # type: ignore[attr-defined]
        app.command(name, cls=cls)(run)
        return action

    return add


def _chosen(record: type[O], given: dict[str, Any]) -> O:
    """Raises ReportedError, which names the field that is wrong."""
    try:
        return record(**{each: value for each, value in given.items() if value is not None})
    except ValidationError as error:
        raise ReportedError(": ".join(first_problem(error))) from error


def _writable(given: O) -> O:
    """``given``; raises ReportedError if its results, which may take hours, could not be kept."""
    for name in _WRITTEN:
        path = getattr(given, name, None)
        if path is not None and path.is_dir():
            raise ReportedError(f"cannot write {path}: it is a folder; name a file")
        if path is not None and not os.access(path.parent, os.W_OK):
            raise ReportedError(f"cannot write {path}: make its folder, or name another file")
    return given


def verdict_command(app: typer.Typer, name: str) -> Callable[[Action[O]], Action[O]]:
    """As ``command``; whatever goes wrong, the exit code is none of a verdict."""
    return command(app, name, exit_code=EXIT_NO_VERDICT, cls=VerdictCommand)


def _parameters(record: type[CommandOptions]) -> Iterator[inspect.Parameter]:
    """First those of the fields that the record does not share, then those of its groups."""
    fields = dict(record.model_fields)
    for group in record.__mro__:
        panel = getattr(group, "panel", None) if group is not record else None
        for name in inspect.get_annotations(group):
            if field := fields.pop(name, None):
                yield _parameter(name, field, panel)


def _parameter(name: str, field: FieldInfo, panel: str | None) -> inspect.Parameter:
    said = (each for each in field.metadata if isinstance(each, ParameterInfo))
    option = copy(next(said, None)) or typer.Option()
    option.help, option.rich_help_panel = option.help or field.description, panel
    for limit in field.metadata:
        option.min = getattr(limit, "ge", option.min)
        option.max = getattr(limit, "le", option.max)
    annotation: Any = field.annotation
    default = inspect.Parameter.empty if field.is_required() else field.default
    if get_origin(annotation) is tuple:
        annotation = list[get_args(annotation)[0]]  # type: ignore[misc]
        default = default if field.is_required() else []
    kind, marked = inspect.Parameter.KEYWORD_ONLY, Annotated[annotation, option]
    return inspect.Parameter(name, kind, default=default, annotation=marked)


@dataclass(frozen=True, slots=True)
class SettingOptions(Generic[S]):
    """The options of a server: one for each field of ``settings``, named by ``flag``."""

    settings: type[S]
    flag: Callable[[str], str] = lambda name: f"--{name.replace('_', '-')}"

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """In the order of options: first those that these settings do not share with others."""
        found, own = self.settings.model_fields, self.settings.__annotations__
        return {name: found[name] for name in sorted(found, key=lambda name: name not in own)}

    def variable(self, name: str) -> str:
        return f"{self.settings.model_config['env_prefix']}{name.upper()}"

    def variables(self, given: dict[str, Any]) -> dict[str, str]:
        """The environment variables with the values of the options."""
        return {
            self.variable(name): str(int(value) if isinstance(value, bool) else value)
            for name, value in _joined(given).items()
        }

    def chosen(self, given: dict[str, Any]) -> S:
        """Raises typer.BadParameter, which names option, variable and allowed range."""
        try:
            return self.settings(**_joined(given))
        except ValidationError as error:
            field, message = first_problem(error)
            name = field.partition(".")[0]
            limits = allowed(self.settings.model_fields[name])
            text = f"{message} (allowed: {limits})" if limits else message
            hint = f"{self.flag(name)} / {self.variable(name)}"
            raise typer.BadParameter(text, param_hint=hint) from error

    def given_to(self, command: C) -> C:
        """``command``, which takes any keywords, with its own parameters and the options."""
        *own, _ = inspect.signature(command).parameters.values()
        first = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        options = [self._parameter(*item) for item in self.fields.items()]
        command.__signature__ = inspect.Signature([*first, *options])  # type: ignore[attr-defined]
        return command

    def _parameter(self, name: str, field: FieldInfo) -> inspect.Parameter:
        annotation, default, text = field.annotation, field.default, field.description
        variable: str | None = self.variable(name)
        if get_origin(annotation) is tuple:
            # The settings read the variable and split it at commas; click would split at spaces.
            text = f"{text}  [env var: {variable}]"
            annotation, default, variable = list[str] | None, None, None
        elif SecretStr in get_args(annotation):
            annotation = str | None
        option = typer.Option(self.flag(name), envvar=variable, help=text)
        kind, marked = inspect.Parameter.KEYWORD_ONLY, Annotated[annotation, option]
        return inspect.Parameter(name, kind, default=default, annotation=marked)


def _joined(given: dict[str, Any]) -> dict[str, Any]:
    """The values of options that have one; a list becomes one text with commas."""
    texts = {n: ",".join(v) if isinstance(v, list) else v for n, v in given.items()}
    return {name: value for name, value in texts.items() if value not in (None, "")}


def allowed(field: FieldInfo) -> str:
    """The range of a field in words; empty without one."""
    limits = {bounds.Ge: "at least", bounds.Gt: "more than", bounds.Le: "at most"}
    words = [
        f"{words} {getattr(limit, kind.__name__.lower()):g}"
        for limit in field.metadata
        for kind, words in limits.items()
        if isinstance(limit, kind)
    ]
    return " and ".join(words)


# -- shared options --------------------------------------------------------------------------------


Url = Annotated[str | None, typer.Option(help="Use this running server; start none.")]
Name = Annotated[
    str | None, typer.Option("--model", help="With --url: the model's name; the first if unset.")
]


def first_key(keys: str | None) -> str | None:
    return keys and keys.partition(",")[0]


ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="POC_API_KEY", callback=first_key, help="A key of the running node, if it needs one."
    ),
]
SeqLen = Annotated[int, typer.Option(help="Tokens per nonce.", min=1)]
Size = Annotated[str, typer.Option(help="tiny (a few MB) or small (about 100M parameters).")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
Png = Annotated[Path | None, typer.Option("--png", help="Draw histograms to this file.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
ForwardBatch = Annotated[int, typer.Option(help="Nonces per forward.", min=1)]
