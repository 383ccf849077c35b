"""The command line: ``python -m soundness``."""

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from measuring.files import DOCS
from measuring.jobs import Job, run_all
from measuring.results import Kept, chosen, table, table_rows, write_page
from proofserve.cli.session import EXIT_FAILED, open_session
from proofserve.host import processor_here
from proofserve.verifier.chat.writers import WRITERS
from soundness import contexts, exact, writers
from soundness.forged import forged_files
from soundness.page import page
from soundness.recorded import README, foreign, nodes_in, record
from soundness.results import Found, convicted_honest, read, replaced, written
from soundness.runs import KeptRuns
from soundness.subjects import BY_NAME, FOLDER, SECOND_SERVER, SUBJECTS, Subject
from soundness.trying import Trial, Trying, calibration_of

PAGE: Final = DOCS / "soundness.md"
CELLS: Final = PAGE.with_suffix(".csv")
RESULTS: Final = Kept(Found, FOLDER / "results")
NODES: Final = FOLDER / "nodes"
LOGS: Final = FOLDER / "logs"

app = typer.Typer(help="Honest nodes and cheats, and how often `verify` convicts each.")
Examine = Annotated[
    list[Path] | None, typer.Option(help="A folder that `record` wrote; repeat it for several.")
]


@app.command()
def run(
    only: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(BY_NAME)}; repeat it for several.")
    ] = None,
    examine: Examine = None,
) -> None:
    """Try everything, write docs/soundness.md and its CSV (some two hours on two cores).

    Vectors are kept in .cache: what was interrupted goes on where it was. A
    model that is not tried keeps its figures. Exit code 1: an honest node was
    convicted.
    """
    names = chosen(only, BY_NAME, "models")
    subjects = [each for each in SUBJECTS if each.arch in names]
    NODES.mkdir(parents=True, exist_ok=True)
    folders = [option for each in examine or () for option in ("--examine", str(each.absolute()))]
    tries = [
        Job(f"{each.arch} {scheme}", ("-m", "soundness", "try", each.arch, scheme, *folders))
        # A model is tried on few nonces because a forward of it takes long: longest jobs first.
        for each in sorted(subjects, key=lambda of: of.nonces)
        for scheme in each.schemes
    ]
    began = time.monotonic()
    with open_session() as session, session.interrupts.allowed():
        run_all([job for each in subjects for job in _servers(each)], LOGS, typer.echo)
        run_all(tries, LOGS, typer.echo)
    typer.echo(f"after {(time.monotonic() - began) / 60:.0f} minutes")
    write()


@app.command("page")
def write() -> None:
    """Write the page and its CSV from what was tried so far."""
    order = [(subject.arch, scheme) for subject in SUBJECTS for scheme in subject.schemes]
    found = RESULTS.all("-".join(pair) for pair in order)
    rows = replaced(read(CELLS.read_text()), [*found.values()], order)
    CELLS.write_text(written(rows))
    write_page(PAGE, page(rows, Trial()))
    if wrong := convicted_honest(rows):
        typer.echo("\n".join(wrong))
        raise typer.Exit(EXIT_FAILED)


def _servers(subject: Subject) -> Iterator[Job]:
    """Real nodes of this machine that have not been recorded yet."""
    made: dict[str, tuple[int, dict[str, str]]] = {"vllm": (1, {})}
    if subject.is_recorded:
        made |= {"vllm-tp2": (2, {}), "vllm-v2": (1, SECOND_SERVER)}
    for name, (ranks, env) in made.items():
        folder = NODES / f"{subject.arch}-{name}"
        about = ("--arch", subject.arch, "--name", name, "--ranks", str(ranks))
        if not (folder / README).is_file():
            arguments = ("-m", "soundness", "record", str(folder), *about)
            yield Job(folder.name, arguments, env, ranks)


@app.command("try")
def try_one(arch: str, scheme: str, examine: Examine = None) -> None:
    """Try one model with one scheme; a step of `run`."""
    subject = BY_NAME[arch]
    folders = sorted(NODES.glob(f"{arch}-vllm*"))
    if subject.is_recorded:
        folders += examine or ()
    with open_session() as session, session.interrupts.allowed():
        session.line.step("loading")
        runs = KeptRuns(subject, scheme)
        real = [node for each in folders for node in nodes_in(each, runs.work.scheme)]
        if subject.is_recorded:
            real.append(foreign(runs.work.scheme))
        calibration = calibration_of(runs, session.line)
        found = Trying(runs, calibration, Trial(), session.line).found(real)
        if subject.is_recorded:
            session.line.step("a forged file, verified again and again")
            found = replace(found, forged=forged_files(runs, calibration))
        RESULTS.write(found.name, found)


@app.command("record")
def record_here(
    folder: Annotated[Path, typer.Argument(help="Is made if it is missing.")],
    arch: Annotated[str, typer.Option(help=f"One of {', '.join(BY_NAME)}.")] = "trained",
    name: Annotated[str | None, typer.Option(help="Of the files; the processor if unset.")] = None,
    ranks: Annotated[int, typer.Option(help="Devices that share each layer.", min=1)] = 1,
) -> None:
    """Write what this machine's vLLM proves, with what it runs on, for others to examine."""
    name = name or re.sub("[^a-z0-9]+", "-", processor_here().lower()).strip("-")
    with open_session() as session:
        record(BY_NAME[arch], name, ranks, folder, session)
        session.console.print(f"recorded in {folder}", soft_wrap=True)


@app.command("start")
def start_one(arch: str, name: str) -> None:
    """Keep what one server proves; a step of `exact`."""
    subject = next(each for each in exact.SUBJECTS if each.arch == arch)
    with open_session() as session:
        exact.prove(subject, exact.BY_START[name], session)


@app.command("ask")
def ask_one(arch: str, kind: str) -> None:
    """Keep the answers of one server; a step of `writers`."""
    with open_session() as session:
        if kind == "honest":
            writers.ask_honest(BY_NAME[arch], session)
        else:
            writers.ask_writer(BY_NAME[arch], kind, session)


@app.command("read")
def read_one(arch: str) -> None:
    """Have the published model read what others wrote; a step of `writers`."""
    with open_session() as session:
        writers.read_answers(BY_NAME[arch], session)


@app.command("writers")
def who_wrote(arch: str) -> None:
    """Who read and who wrote live answers of `trained` or `smollm2` (half an hour on two cores)."""
    writers.prepare_liar()
    with open_session() as session, session.interrupts.allowed():
        run_all(writers.jobs(arch), LOGS, typer.echo)
        trial = writers.AnswersTrial(BY_NAME[arch], session.line)
        typer.echo(table(writers.HEAD, [], rule=" --- "))
        for name in WRITERS:
            typer.echo(trial.of_writer(name))
        typer.echo(trial.honest())


@app.command("contexts")
def longer_contexts() -> None:
    """What longer contexts change, as a table (an hour on two cores).

    Vectors are kept in .cache: what was interrupted goes on where it was.
    """
    with open_session() as session, session.interrupts.allowed():
        # As they come: the whole takes so long that it may be stopped.
        typer.echo(table(contexts.HEAD, [], rule=" --- "))
        for each in contexts.NONCES:
            typer.echo(table_rows(contexts.rows(each, session.line)))


@app.command("exact")
def exact_bits() -> None:
    """Count how often the bits of two servers agree, and write docs/exact.md (half an hour).

    What was proved is kept in .cache: what was interrupted goes on where it was.
    """
    with open_session() as session, session.interrupts.allowed():
        run_all(exact.missing(), LOGS, typer.echo)
        write_page(exact.PAGE, exact.page())


if __name__ == "__main__":
    app()
