"""Command-line options made of settings, so that no name, default or description stands twice."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin

import annotated_types as bounds
import typer
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

S = TypeVar("S", bound=BaseSettings)


@dataclass(frozen=True, slots=True)
class SettingOptions(Generic[S]):
    """The options of a command: one for each field of ``settings``, named by ``flag``."""

    settings: type[S]
    flag: Callable[[str], str]

    def variable(self, name: str) -> str:
        """The environment variable of a field."""
        return f"{self.settings.model_config['env_prefix']}{name.upper()}"

    def variables(self, given: dict[str, Any]) -> dict[str, str]:
        """The environment that gives the options' values to another process."""
        return {self.variable(name): _text(value) for name, value in _joined(given).items()}

    def chosen(self, given: dict[str, Any]) -> S:
        """The settings that the options' values make.

        Raises typer.BadParameter, which names option, variable and allowed range.
        """
        try:
            return self.settings(**_joined(given))
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            text = f"{first['msg']}{_range(self.settings.model_fields[name])}"
            hint = f"{self.flag(name)} / {self.variable(name)}"
            raise typer.BadParameter(text, param_hint=hint) from error

    def parameters(self) -> list[inspect.Parameter]:
        """The options as the parameters of a function, which typer reads."""
        return [self._parameter(*item) for item in self.settings.model_fields.items()]

    def _parameter(self, name: str, field: FieldInfo) -> inspect.Parameter:
        annotation, default, text = field.annotation, field.default, field.description
        variable: str | None = self.variable(name)
        if get_origin(annotation) is tuple:
            # The settings read the variable: click would split it at spaces, they do at commas.
            text = f"{text}  [env var: {variable}]"
            annotation, default, variable = list[str] | None, None, None
        elif SecretStr in get_args(annotation):
            annotation = str | None
        option = typer.Option(self.flag(name), envvar=variable, help=text)
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[annotation, option],
        )


def _joined(given: dict[str, Any]) -> dict[str, Any]:
    """The values, lists as one text with commas, without options that have no value."""
    texts = {n: ",".join(v) if isinstance(v, list) else v for n, v in given.items()}
    return {name: value for name, value in texts.items() if value not in (None, "")}


def _text(value: object) -> str:
    return str(int(value) if isinstance(value, bool) else value)


def _range(field: FieldInfo) -> str:
    limits = {bounds.Ge: "at least", bounds.Gt: "more than", bounds.Le: "at most"}
    words = [
        f"{words} {getattr(limit, kind.__name__.lower())}"
        for limit in field.metadata
        for kind, words in limits.items()
        if isinstance(limit, kind)
    ]
    return f" (allowed: {' and '.join(words)})" if words else ""
