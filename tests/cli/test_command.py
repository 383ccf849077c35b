"""A command whose options are the fields of a record."""

from pathlib import Path
from typing import Annotated, ClassVar

import pytest
import typer
from click.testing import Result
from pydantic import Field
from typer.testing import CliRunner

from proofserve.cli.command import CommandOptions, command, verdict_command
from proofserve.cli.session import CommandSession
from proofserve.reports import ReportedError


class SharedOptions(CommandOptions):
    panel: ClassVar[str | None] = "Shared by several"

    file: tuple[Path, ...] = ()
    """Files to read."""
    key: Annotated[str | None, typer.Option(envvar="TRIED_KEY")] = None
    """A key."""


class TriedOptions(SharedOptions):
    name: Annotated[str, typer.Argument()]
    """Whom to greet."""
    times: int = Field(1, ge=1, le=9)
    """How often."""


def run(*arguments: str, exit_code: int | None = None, **variables: str) -> tuple[Result, list]:
    app, given = typer.Typer(), list[TriedOptions]()

    @verdict_command(app, "tried")
    def tried(options: TriedOptions, session: CommandSession) -> int | None:
        """Greet."""
        given.append(options)
        if options.name == "none":
            raise ReportedError("there is no one")
        session.tell(f"hello {options.name}")
        return exit_code

    return CliRunner().invoke(app, arguments, env=variables), given


def test_a_record_has_what_the_command_was_given() -> None:
    result, (given,) = run("you", "--file", "a", "--file", "b", "--times", "2", TRIED_KEY="secret")
    assert (result.exit_code, result.output) == (0, "hello you\n")
    assert (given.name, given.times, given.key) == ("you", 2, "secret")
    assert given.file == (Path("a"), Path("b"))
    assert "secret" not in repr(given)


def test_what_was_not_given_has_its_default() -> None:
    _, (given,) = run("you")
    assert (given.times, given.file, given.key) == (1, (), None)


def test_the_help_has_own_options_first_and_shared_ones_under_their_heading() -> None:
    text, _ = run("--help")
    own, _, shared = text.output.partition("Shared by several")
    assert "How often." in own
    assert "1<=x<=9" in own
    assert "Files to read." in shared
    assert "TRIED_KEY" in shared


@pytest.mark.parametrize(("code", "ends"), [(None, 0), (0, 0), (2, 2)])
def test_a_command_returns_its_exit_code(code: int | None, ends: int) -> None:
    assert run("you", exit_code=code)[0].exit_code == ends


@pytest.mark.parametrize("arguments", [("you", "--times", "0"), ("you", "--timse", "2"), ("none",)])
def test_a_verdict_is_never_the_exit_code_of_an_error(arguments: tuple[str, ...]) -> None:
    assert run(*arguments)[0].exit_code == 3


def test_a_mistyped_option_is_guessed() -> None:
    result, _ = run("you", "--timse", "2")
    assert "--times" in result.output


def test_an_error_of_another_command_ends_it_with_2() -> None:
    app = typer.Typer()

    @command(app, "tried")
    def tried(_options: TriedOptions, _session: CommandSession) -> None:
        """Greet."""
        raise ReportedError("there is no one")

    result = CliRunner().invoke(app, ["you"])
    assert (result.exit_code, result.output) == (2, "there is no one\n")
