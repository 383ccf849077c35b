"""``proofserve validate``: many nodes, again and again, with a ledger."""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from proofserve.cli.command import verdict_command
from proofserve.cli.session import COLOURS, CommandSession, worst_exit_code
from proofserve.cli.validator.options import ReportOptions
from proofserve.client.judging import reference_extra
from proofserve.protocol.verdict.counting import SequentialResult, share_of_alpha
from proofserve.settings.validation import validation_plan
from proofserve.verifier.validation.ledger import YEAR_S, Ledger, NodeResult
from proofserve.verifier.validation.report import ValidationReport
from proofserve.verifier.validation.run import Validation, ValidationPlan

app = typer.Typer()

_NOT_JUDGED: Final = SequentialResult.UNEXPLAINED


class ValidateOptions(ReportOptions):
    file: Annotated[Path, typer.Argument()]
    """nodes.toml: see below."""
    check_config: Annotated[bool, typer.Option("--check-config")] = False
    """Only say what would be done, and what is wrong."""


@verdict_command(app, "validate")
def validate(given: ValidateOptions, session: CommandSession) -> int:
    """Challenge every node that is due, judge them, and keep a ledger.

    For a scheduler: one call is one turn. Nodes of a model are asked at the same
    time, each for nonces of a new block with a key of its own, and judged in the
    same passes over the weights. A node that does not answer in time is unproved,
    which is not fraud.

    The ledger (SQLite) has each challenge before it is sent, and each answer
    before it is judged. After a kill the next call goes on where this one was: it
    asks for the same block again, within ten minutes, and judges with the same
    seed. A second call at the same time is refused.

    alpha is the chance that an honest node is convicted in any 365 days. Each
    verdict gets its part when its challenge is written down. A node is its name.

    Exit code, of what this call found, and a killed one before it: 1 a node is a
    fraud; else 3 a node could not be judged, or the file is wrong; else 2 a node is
    unproved or undecided; else 0, also if no node was due.

    \b
    \\[validate]                # each of these may be left out
    ledger = "ledger.sqlite"    # paths are from the folder of this file
    every = "1d"                # or 90m, 6h; due after nine tenths of it
    alpha = 1e-4                # also beta, share, nonces = 100, deadline = "60s"
    page = "nodes.html"         # what the ledger says
    metrics = "validate.prom"   # for the textfile collector of Prometheus
    bundles = "bundles"         # evidence of verdicts that are not honest
    \b
    \\[models.qwen]
    checkpoint = "./qwen"       # or references = \\["http://a:8000", ...]
    calibration = "qwen.json"   # may be left out; also suspects, scheme, seq_len,
                                # device, forward_batch
    \b
    \\[nodes.berlin-1]
    url = "http://node:8000"
    model = "qwen"
    key_env = "BERLIN_1_KEY"    # or key_file, or none for a node without keys
    public_key = "..."          # may be left out: the key of its answers

    \b
    proofserve validate nodes.toml --check-config
    proofserve validate nodes.toml
    """
    session.line.step(f"reading {given.file}")
    plan = validation_plan(given.file)
    if given.check_config:
        _tell_plan(plan, session)
        return 0
    with reference_extra(), Ledger.opened(plan.ledger) as ledger:
        found = _run(plan, ledger, session)
        report = ValidationReport(plan, ledger.standings([*plan.nodes]), time.time())
        report.write()
        session.console.print(report.table())
        given.write({**report.record(), "found": {each.node: each.reason for each in found}})
        ledger.tell()
    return worst_exit_code(each.outcome or _NOT_JUDGED for each in found)


def _run(plan: ValidationPlan, ledger: Ledger, session: CommandSession) -> Sequence[NodeResult]:
    def passed(passes: int, index: int, of: int) -> None:
        session.line.reached(f"pass {passes}, layer {index} of {of}")

    found = []
    run = Validation(plan, ledger, session.line, passed).run()
    # What a call found that was killed has been in no exit code.
    for each in itertools.chain(ledger.untold(), run):
        found.append(each)
        named = f"{each.outcome or 'not judged'}{f' ({each.kind})' if each.kind else ''}"
        colour = COLOURS[each.outcome or _NOT_JUDGED]
        session.tell(f"{each.node} ({each.model}): {named}: {each.reason}", colour)
    if not found:
        session.tell(f"no node is due: each is asked once in {plan.every_s / 3600:g} h")
    return found


def _tell_plan(plan: ValidationPlan, session: CommandSession) -> None:
    a_year = int(YEAR_S / plan.every_s)
    for model in plan.models:
        judged_by = model.checkpoint or f"{len(model.references)} references"
        shape = f"{plan.nonces} nonces of {model.shape.scheme}, {model.shape.seq_len} tokens"
        calibrated = f", {model.calibration}" if model.calibration else ""
        nodes = f"{len(model.nodes)} nodes"
        session.tell(f"{model.name}: {nodes}, {shape}, judged by {judged_by}{calibrated}")
    alpha = plan.alpha * share_of_alpha(0.0, 0, a_year)
    session.tell(f"{a_year} challenges of a node in a year, the first with an alpha of {alpha:.2g}")
    session.tell(f"the ledger is {plan.ledger}; nothing is wrong")
