"""``proofserve watch-chat``: checks a provider's answers as long as it runs."""

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from proofserve.cli.chat.verify import ChatCalibration, CheckedModel, show
from proofserve.cli.options import ApiKey, Device, Suspects
from proofserve.cli.session import EXIT_NO_VERDICT, CommandSession, VerdictCommand, open_session
from proofserve.cli.verify import EXIT_CODES
from proofserve.lab.calibrate import calibration_file
from proofserve.lab.chat.collecting import ReceiptClient
from proofserve.lab.chat.conversation import Conversation, read
from proofserve.lab.chat.following import LogFollower
from proofserve.lab.chat.prompts import request
from proofserve.lab.chat.statements import Known
from proofserve.lab.chat.verification import ChatOutcome
from proofserve.lab.chat.watching import Watch
from proofserve.lab.client.errors import LabError, NodeError
from proofserve.lab.report.json_files import write_json
from proofserve.lab.verify.judges import Chances
from proofserve.protocol.nonces import fresh_seed
from proofserve.protocol.verdict.sequential import SequentialResult

app = typer.Typer()

TOKENS = 64
# So many that two prompts are never alike.
_PROMPT_BITS = 64
# Asks for a chat, or reads one. Raises LabError.
Fetch = Callable[[], Conversation]


@app.command("watch-chat", cls=VerdictCommand)
def command(
    url: Annotated[str, typer.Argument(help="A gateway, or a node.")],
    *,
    model: CheckedModel,
    calibration: ChatCalibration = None,
    chats: Annotated[
        Path | None, typer.Option(help="Check the chats that the Python client keeps here.")
    ] = None,
    share: Annotated[
        float, typer.Option(help="With --chats: the share of them to check.", min=0.0, max=1.0)
    ] = 1.0,
    every: Annotated[float, typer.Option(help="Seconds between two checks.", min=0.1)] = 10.0,
    seconds: Annotated[
        float | None,
        typer.Option("--for", help="End after so many seconds; never if unset.", min=0.0),
    ] = None,
    log: Annotated[
        str | None, typer.Option(help="The node, if URL is a gateway: follow its public log.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the running report here.")] = None,
    suspect: Suspects = None,
    api_key: ApiKey = None,
    device: Device = "cpu",
    seed: Annotated[
        str | None,
        typer.Option(
            help="Chooses prompts and samples as in an earlier watch. If unset, a new one: a"
            " provider that knows it can tell these chats from others."
        ),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Chance to ever convict an honest node.")] = 1e-6,
    beta: Annotated[float, typer.Option(help="Chance to clear a fraudulent node.")] = 1e-3,
) -> None:
    """Check a provider's answers by their receipts, again and again.

    Without --chats it sends chats of its own, one each --every seconds, half
    of them greedy. A provider must not be able to tell them from others: use
    an ordinary API key. With --chats it checks a share of what an application
    keeps by `proofserve.client.receipts.Recorder`, and sends nothing.

    Answers count together until they clear the node; then it begins anew. It
    ends with exit code 1 at the first verdict of fraud; else, at the end of
    --for, with that of the last check: 0 honest, 2 undecided, 3 if no known
    kernel and no known fraud explains the errors. A chat that the provider does
    not answer, or a file that is none, is told and counted.

    \b
    proofserve watch-chat http://gateway:9000 --model ./model --calibration chat.json
    proofserve watch-chat http://gateway:9000 --model ./model --calibration chat.json
        --chats ./chats --share 0.01 --out report.json
    """
    # Loading torch takes seconds, and --help must not wait for it.
    from proofserve.wiring.chat.checker import ChatChecker, CheckerSetup  # noqa: PLC0415

    with open_session(EXIT_NO_VERDICT) as session, session.interrupts.allowed():
        chances = Chances(alpha, beta)
        session.line.step(f"loading {model}")
        measured = calibration_file.read(calibration) if calibration else None
        others = tuple(suspect or ())
        seed = seed or fresh_seed()
        checker = ChatChecker(CheckerSetup(model, measured, seed, device, others))
        follower = LogFollower(log) if log else None

        def judge(window: Sequence[Conversation], present: Chances) -> ChatOutcome:
            seen = follower.seen(window) if follower else None
            known = Known(checker.weights_digest, log=seen)
            return checker.outcome(window, known, present, session.line)

        watch = Watch(judge, chances, checker.origin, seed)
        with ReceiptClient(url, api_key) as client:
            source = _kept(chats, share, seed) if chats else _asked(client, seed)
            verdict = _watch(watch, source, every, seconds, out, session)
    raise typer.Exit(EXIT_CODES[verdict])


def _watch(
    watch: Watch,
    source: Iterator[list[Fetch]],
    every: float,
    seconds: float | None,
    out: Path | None,
    session: CommandSession,
) -> SequentialResult:
    """The verdict of fraud that ends the watch, else the last one."""
    until = math.inf if seconds is None else time.monotonic() + seconds
    verdict = SequentialResult.UNDECIDED
    while (began := time.monotonic()) < until:
        if fetches := next(source):
            verdict = _check(watch, fetches, session)
            if out is not None:
                _write(out, watch)
            if verdict is SequentialResult.FRAUD:
                break
        session.line.step(f"{watch.totals.chats} chats; the next check is in {every:g} s")
        time.sleep(max(0.0, min(began + every, until) - time.monotonic()))
    return verdict


def _check(watch: Watch, fetches: Sequence[Fetch], session: CommandSession) -> SequentialResult:
    """The verdict with new chats; undecided if one could not be had, which does not end a watch."""
    fresh: list[Conversation] = []
    for fetch in fetches:
        try:
            fresh.append(fetch())
        except LabError as error:
            watch.totals.unreadable += 1
            session.console.print(str(error), style="red", markup=False, soft_wrap=True)
    verdict = SequentialResult.UNDECIDED
    if fresh:
        try:
            verdict = watch.add(fresh)
        except NodeError as error:
            # The log cannot be read now; these chats are checked with the next ones.
            session.console.print(str(error), style="red", markup=False, soft_wrap=True)
        else:
            if watch.report is not None:
                show(session.console, watch.report)
    if verdict is SequentialResult.HONEST and len(fresh) < len(fetches):
        return SequentialResult.UNDECIDED
    return verdict


def _write(out: Path, watch: Watch) -> None:
    """A reader never sees half a report."""
    half = out.with_name(f".{out.name}.part")
    write_json(half, watch.record())
    half.replace(out)


def _asked(client: ReceiptClient, seed: str) -> Iterator[list[Fetch]]:
    """A chat of our own each time; no two are alike."""
    model, draw = client.model(), random.Random(seed)  # noqa: S311 - prompts, no secrets
    for number in itertools.count():
        body = request(model, draw.getrandbits(_PROMPT_BITS), TOKENS, greedy=number % 2 == 1)
        yield [partial(client.chat, f"chat {number}", body)]


def _kept(folder: Path, share: float, seed: str) -> Iterator[list[Fetch]]:
    """The chats that were added to ``folder`` since the last time, a ``share`` of them."""
    if not folder.is_dir():
        raise LabError(f"--chats: {folder} is no folder")
    known: set[Path] = set()
    draw = random.Random(seed)  # noqa: S311 - the provider has answered before
    while True:
        new = sorted(set(folder.glob("*.json")) - known)
        known.update(new)
        yield [partial(read, path) for path in new if draw.random() < share]
