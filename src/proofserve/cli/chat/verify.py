"""``proofserve verify-chat``: whether chat answers came from the model that they claim."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from proofserve.cli.chat.logs import seen_log
from proofserve.cli.options import Device, Json, Suspects
from proofserve.cli.session import EXIT_NO_VERDICT, VerdictCommand, open_session
from proofserve.cli.verify import COLOURS, EXIT_CODES, GIVEN_SEED
from proofserve.lab.calibrate import calibration_file
from proofserve.lab.chat.conversation import Conversation, read
from proofserve.lab.chat.report import ChatReport
from proofserve.lab.chat.statements import Known
from proofserve.lab.client.errors import LabError
from proofserve.lab.report.json_files import write_json
from proofserve.lab.verify.judges import Chances
from proofserve.protocol.nonces import fresh_seed
from proofserve.protocol.receipts.signature import PUBLIC_KEY_BYTES

app = typer.Typer()

ChatCalibration = Annotated[
    Path | None, typer.Option("--calibration", help="A file of `calibrate chat --out`.")
]
CheckedModel = Annotated[Path, typer.Option("--model", help="The checkpoint that was promised.")]


@app.command("verify-chat", cls=VerdictCommand)
def command(
    files: Annotated[
        list[Path], typer.Argument(help="Chats, each with its request, response and receipts.")
    ],
    *,
    model: CheckedModel,
    calibration: ChatCalibration = None,
    log: Annotated[
        str | None,
        typer.Option(
            metavar="URL|FILE",
            help="The public log that has to have the receipts: a node, or the SQLite file of"
            " `proofserve receive`.",
        ),
    ] = None,
    public_key: Annotated[
        str | None, typer.Option(help="Of the node, in hexadecimal; any if unset.")
    ] = None,
    suspect: Suspects = None,
    device: Device = "cpu",
    seed: Annotated[
        str | None,
        typer.Option(
            help="Compare the parts of long answers that this seed chose, to reproduce a verdict."
            " If unset, a new one: a node that knows the seed knows the parts."
        ),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Chance to convict an honest node.")] = 1e-6,
    beta: Annotated[float, typer.Option(help="Chance to clear a fraudulent node.")] = 1e-3,
    json: Json = None,
) -> None:
    """Check answers by their receipts, and reach a verdict: honest or fraud.

    A file is a JSON object with "request" (the body that the client sent), "response" (what it
    got) and "receipts" (of GET /v1/receipts/ID). `watch-chat` and the Python client write such
    files. Ask with "return_token_ids": true, because a text can have several token ids.

    \b
    signature  it is the node's, over this receipt
    log        the receipt entered the public log within a minute of the answer
    prompt     the node read the prompt of the request, by the checkpoint's template
    answer     the receipt is of these tokens
    sampling   the tokens were drawn by the parameters of the request
    paired     how large the sketches' errors are beside those of honest kernels
    direction  whether they point to where suspected weights would move them
    tokens     whether the model itself wrote the answer, not a cheaper one

    Exit code 0: honest. 1: fraud. 2: undecided, because there were too few
    tokens. 3: no verdict: an option, a file or the recomputation is wrong, or
    neither an honest kernel nor a fraud that is known explains the errors.

    A server is honest if it is like one of the calibration's kernels, and a
    fraud only if it is like none of them. Without a calibration direction and
    tokens convict only what goes further than every honest kernel that is
    emulated on the same answers.

    \b
    proofserve calibrate chat ./model --out chat.json
    proofserve verify-chat answer.json --model ./model --calibration chat.json
    proofserve verify-chat chats/*.json --model ./model --calibration chat.json
        --log http://node:8000
    proofserve verify-chat chats/*.json --model ./model --calibration chat.json
        --log received.sqlite
    """
    # Loading torch takes seconds, and --help must not wait for it.
    from proofserve.wiring.chat.checker import ChatChecker, CheckerSetup  # noqa: PLC0415

    with open_session(EXIT_NO_VERDICT) as session, session.interrupts.allowed():
        key, chances = _key(public_key), Chances(alpha, beta)
        session.line.step(f"reading {len(files)} files")
        chats = [read(file) for file in files]
        _require_distinct(chats)
        session.line.step(f"loading {model}")
        others = tuple(suspect or ())
        measured = calibration_file.read(calibration) if calibration else None
        chosen_by = seed or fresh_seed()
        checker = ChatChecker(CheckerSetup(model, measured, chosen_by, device, others))
        known = Known(checker.weights_digest, key, seen_log(log, chats, key) if log else None)
        outcome = checker.outcome(chats, known, chances, session.line)
        report = ChatReport(outcome, checker.origin, chosen_by)
        show(session.console, report)
        if seed:
            session.console.print(GIVEN_SEED, markup=False, soft_wrap=True)
        if json is not None:
            write_json(json, report.record())
    raise typer.Exit(EXIT_CODES[report.outcome.verdict])


def show(console: Console, report: ChatReport) -> None:
    verdict = report.outcome.verdict
    console.print(f"[bold {COLOURS[verdict]}]{verdict}[/]")
    for line in report.lines():
        console.print(line, markup=False, soft_wrap=True)


def _key(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError as error:
        raise LabError(f"--public-key: {text!r} is not hexadecimal") from error
    if len(key) != PUBLIC_KEY_BYTES:
        raise LabError(f"--public-key: {len(key)} bytes where {PUBLIC_KEY_BYTES} are needed")
    return key


def _require_distinct(chats: Sequence[Conversation]) -> None:
    """The evidence of an answer counts once."""
    known: dict[str, str] = {}
    for chat in chats:
        if chat.response_id in known:
            both = f"{known[chat.response_id]} and {chat.name}"
            raise LabError(f"{both} are of the same response {chat.response_id}")
        known[chat.response_id] = chat.name
