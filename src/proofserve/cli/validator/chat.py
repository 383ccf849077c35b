"""``proofserve verify-chat`` and ``watch-chat``: whether answers came from the claimed model."""

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from proofserve.cli.command import ApiKey, verdict_command
from proofserve.cli.session import EXIT_CODES, CommandSession
from proofserve.cli.validator.options import (
    CalibrationOptions,
    ChanceOptions,
    CheckpointOptions,
    ReportOptions,
)
from proofserve.cli.validator.verify import GIVEN_SEED
from proofserve.client.judging import validator_setup
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.nonces import fresh_seed
from proofserve.protocol.receipts.record import PUBLIC_KEY_BYTES, SignedReceipt, is_signed
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.receiver.reader import ReceiverFileError, is_database, reading
from proofserve.reports import NodeError, ReportedError, write_json
from proofserve.verifier.chat.conversation import (
    Conversation,
    PublicLog,
    ReceiptClient,
    read,
    request,
)
from proofserve.verifier.chat.statements import LATE_MS, MOST_GAPS, FailedCheck, NodeFacts
from proofserve.verifier.chat.verification import ChatChecker, ChatVerification
from proofserve.verifier.chat.watching import EvidenceFile, LogFollower, Watch
from proofserve.verifier.chat.writers import WRITERS
from proofserve.verifier.judges import ALPHA, Chances

verify_app, watch_app = typer.Typer(), typer.Typer()

# Of each answer of ``watch-chat``.
TOKENS = 64
# So many that two prompts are never alike.
_PROMPT_BITS = 64
# Asks for a chat, or reads one. Raises ReportedError.
Fetch = Callable[[], Conversation]


class ChatOptions(CheckpointOptions, CalibrationOptions, ChanceOptions):
    """What both commands are given."""

    panel = "The receipts"

    model: Path
    """The checkpoint that was promised."""
    calibration: Path | None = None
    """A file of `calibrate chat --out`."""
    late_after: float = Field(LATE_MS / 1e3, ge=0.0)
    """A receipt is late if the client's side first saw it, or its log entry, so many seconds after
    the answer."""
    most_gaps: float = Field(MOST_GAPS, ge=0.0, le=1.0)
    """No provider is honest if a larger share of its answers has no receipt, a late one, or one
    that cannot be checked."""
    rule_out: Annotated[int, typer.Option(metavar="BITS")] = Field(0, ge=0, le=8)
    """No provider is honest before its tokens have ruled out writers whose weights have so many
    bits, or fewer: 4 or 8. 0 asks for none; the report names them in any case."""

    def checker(self, seed: str, session: CommandSession) -> ChatChecker:
        """Load the checkpoint, which compares parts that ``seed`` chose."""
        session.line.step(f"loading {self.model}")
        setup = validator_setup(self.model, self.device, self.suspect)
        return ChatChecker(setup, self.measured(), seed, self.most_gaps)

    def facts(
        self, checker: ChatChecker, key: bytes | None, log: PublicLog | FailedCheck | None
    ) -> NodeFacts:
        late_ms = int(self.late_after * 1000)
        return NodeFacts(checker.weights_digest, key, log, late_ms=late_ms)


class VerifyChatOptions(ChatOptions, ReportOptions):
    files: Annotated[tuple[Path, ...], typer.Argument()]
    """Chats, each with its request, response and receipts."""
    log: Annotated[str | None, typer.Option(metavar="URL|FILE")] = None
    """The public log that has to have the receipts: a node, or the SQLite file of `proofserve
    receive`."""
    public_key: str | None = None
    """Of the node, in hexadecimal; any if unset."""
    seed: str | None = None
    """Compare the parts of long answers that this seed chose, to reproduce a verdict. If unset, a
    new one: a node that knows the seed knows the parts."""


@verdict_command(verify_app, "verify-chat")
def verify_chat(given: VerifyChatOptions, session: CommandSession) -> int:
    """Check answers by their receipts, and reach a verdict: honest or fraud.

    A file is a JSON object with "request" (the body that the client sent), "response" (what it
    got), "receipts" (of GET /v1/receipts/ID), and by the client's own clock in Unix milliseconds
    "ended_ms" of the answer and "seen_ms" of the receipts. The Python client writes such files.
    Ask with "return_token_ids": true, because a text can have several token ids.

    \b
    signature  it is the node's, over this receipt
    log        the receipt is under a root of the node's log
    prompt     the node read the prompt of the request, by the checkpoint's template
    answer     the receipt is of these tokens
    sampling   the tokens were drawn by the parameters of the request
    paired     how long the sketches' errors are beside those of honest kernels
    direction  whether they are shorter without what suspected weights would add
    footprint  whether they point where our run of the server's kernel errs
    tokens     whether the model itself wrote the answer, not a cheaper one

    Exit code 0: honest. 1: fraud. 2: undecided, because there were too few
    tokens, or unproved: too many receipts are missing, late or cannot be
    checked. 3: no verdict: an option, a file or the recomputation is wrong, or
    neither an honest kernel nor a fraud that is known explains the errors.

    Without a calibration direction and tokens convict only what goes further
    than honest kernels that are emulated on the same answers.

    \b
    proofserve calibrate chat ./model --out chat.json
    proofserve verify-chat answer.json --model ./model --calibration chat.json
    proofserve verify-chat chats/*.json --model ./model --calibration chat.json
        --log http://node:8000
    proofserve verify-chat chats/*.json --model ./model --calibration chat.json
        --log received.sqlite
    """
    key, chances = _key(given.public_key), Chances(given.alpha, given.beta)
    session.line.step(f"reading {len(given.files)} files")
    chats = [read(file) for file in given.files]
    known: dict[str, str] = {}
    for chat in chats:
        # The evidence of an answer counts once.
        if chat.response_id in known:
            both = f"{known[chat.response_id]} and {chat.name}"
            raise ReportedError(f"{both} are of the same response {chat.response_id}")
        known[chat.response_id] = chat.name
    checker = given.checker(given.seed or fresh_seed(), session)
    facts = given.facts(checker, key, seen_log(given.log, chats, key) if given.log else None)
    outcome = checker.outcome(chats, facts, chances, session.line, given.rule_out)
    session.show(outcome.verdict, outcome.lines())
    if given.seed:
        session.tell(GIVEN_SEED)
    given.write(outcome.record())
    return EXIT_CODES[outcome.verdict]


def _key(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError as error:
        raise ReportedError(f"--public-key: {text!r} is not hexadecimal") from error
    if len(key) != PUBLIC_KEY_BYTES:
        raise ReportedError(f"--public-key: {len(key)} bytes where {PUBLIC_KEY_BYTES} are needed")
    return key


def seen_log(
    source: str, chats: Sequence[Conversation], public_key: bytes | None
) -> PublicLog | FailedCheck | None:
    """The log at ``source``, as far as ``chats`` need it; None if they have no logged receipt.

    ``source`` is a node's URL or the SQLite file of ``proofserve receive``. A failure if the log
    forks or is broken. Raises ReportedError if it cannot be read, and if a file lacks an entry: the
    node may have been unable to reach the receiver.
    """
    if "://" in source:
        return LogFollower(source).seen(chats)
    # The receipts with a signed entry; all others fail whatever the log has.
    receipts = [
        each
        for chat in chats
        for each in chat.receipts
        if each.inclusion is not None
        and public_key in {None, each.public_key}
        and is_signed(each.inclusion.entry.hash, each.entry_signature or b"", each.public_key)
    ]
    if not receipts:
        return None
    path = Path(source)
    try:
        if not is_database(path):
            raise ReportedError(
                f"--log: {path} is neither a URL nor a file of `proofserve receive`"
            )
        return _received_log(path, receipts)
    except OSError as error:
        text = f"--log: {path} is no URL, and as a file it cannot be read: {error.strerror}"
        raise ReportedError(text) from error
    except ReceiverFileError as error:
        raise ReportedError(f"--log: {error}") from error


def _received_log(path: Path, receipts: Sequence[SignedReceipt]) -> PublicLog | FailedCheck:
    """The part of the log in ``path`` between the first and the last entry of ``receipts``."""
    keys = {each.public_key for each in receipts}
    if len(keys) > 1:
        raise ReportedError("--log: the receipts are of several nodes; give those of one at a time")
    (key,) = keys
    places = [each.inclusion.entry.index for each in receipts if each.inclusion]
    first, last = min(places), max(places)
    with reading(path) as received:
        forked = received.forked(key, first)
        came = received.log(key, first, last)
    entries = [each for each, _ in came]
    # A receiver stores signed entries only, so another one is the file's fault, not the node's.
    for each in (*forked, *entries):
        if not is_signed(each.entry.hash, each.signature, key):
            index = each.entry.index
            raise ReportedError(
                f"--log: {path} is damaged: entry {index} is not signed by its node"
            )
    hashes: dict[int, bytes] = {}
    for each in forked:
        if hashes.setdefault(each.entry.index, each.entry.hash) != each.entry.hash:
            index = each.entry.index
            return FailedCheck("log", f"{path}: it forks: the node signed two entries {index}")
    there = {each.entry.index for each in entries}
    if len(there) <= last - first:
        # Indices of a damaged receipt may be far apart: this counts up to the first gap only.
        missing = next(index for index in itertools.count(first) if index not in there)
        raise ReportedError(
            f"--log: {path} has no entry {missing} of the node's log, which these receipts need;"
            " read the log from the node: --log URL"
        )
    try:
        seen_ms = {each.entry.index: int(at * 1000) for each, at in came}
        return PublicLog(entries, key, seen_ms)
    except ProtocolError as error:
        return FailedCheck("log", f"{path}: {error}")


class WatchChatOptions(ChatOptions):
    url: Annotated[str, typer.Argument()]
    """A gateway, or a node."""
    chats: Path | None = None
    """Check the chats that the Python client keeps here."""
    share: float = Field(1.0, ge=0.0, le=1.0)
    """With --chats: the share of them to check."""
    every: float = Field(10.0, ge=0.1)
    """Seconds between two checks."""
    seconds: Annotated[float | None, typer.Option("--for")] = Field(None, ge=0.0)
    """End after so many seconds; never if unset."""
    log: str | None = None
    """The node, if URL is a gateway: follow its public log."""
    out: Path | None = None
    """Write the running report here."""
    evidence: Path | None = None
    """Keep here what answers showed, and go on with what is there."""
    api_key: ApiKey = None
    seed: str | None = None
    """Chooses prompts and samples as in an earlier watch. If unset, a new one: a provider that
    knows it can tell these chats from others."""
    alpha: float = ALPHA
    """Chance to ever convict an honest node."""


@verdict_command(watch_app, "watch-chat")
def watch_chat(given: WatchChatOptions, session: CommandSession) -> int:
    """Check a provider's answers by their receipts, again and again.

    Without --chats it sends chats of its own, one each --every seconds, half
    of them greedy. A provider must not be able to tell them from others: use
    an ordinary API key. With --chats it checks a share of what an application
    keeps by `proofserve.client.Recorder`, and sends nothing.

    Answers count together until they clear the node; then it begins anew. It
    ends with exit code 1 at the first verdict of fraud; else, at the end of
    --for, with that of the last check: 0 honest, also if answers since then are too few
    to tell, 2 undecided or unproved, 3 if no known kernel and no known fraud explains the
    errors. A chat that the provider does not answer, or a file that is none, is told and
    counted.

    \b
    proofserve watch-chat http://gateway:7000 --model ./model --calibration chat.json
    proofserve watch-chat http://gateway:7000 --model ./model --calibration chat.json
        --chats ./chats --share 0.01 --out report.json
    """
    chances, seed = Chances(given.alpha, given.beta), given.seed or fresh_seed()
    with ReceiptClient(given.url, given.api_key) as client:
        # What is no URL or no folder shows before minutes of loading.
        source = _kept(given.chats, given.share, seed) if given.chats else _asked(client, seed)
        return _watched(given, source, chances, seed, session)


def _watched(
    given: WatchChatOptions,
    source: Iterator[list[Fetch]],
    chances: Chances,
    seed: str,
    session: CommandSession,
) -> int:
    """The exit code of a watch."""
    checker = given.checker(seed, session)
    follower = LogFollower(given.log) if given.log else None

    def judge(window: Sequence[Conversation], present: Chances) -> ChatVerification:
        facts = given.facts(checker, None, follower.seen(window) if follower else None)
        return checker.readers(window, facts, present, session.line)

    rests_on = {"weights": checker.weights_digest, "alpha": given.alpha, "beta": given.beta}
    rests_on["writers"] = [*WRITERS]
    file = EvidenceFile(given.evidence, rests_on) if given.evidence else None
    writers = checker.writers(replace(chances, alpha=given.alpha / 2), given.rule_out)
    watch = Watch(judge, writers, chances, given.most_gaps, file, seed)
    return EXIT_CODES[_watch(watch, source, given, session)]


def _watch(
    watch: Watch, source: Iterator[list[Fetch]], given: WatchChatOptions, session: CommandSession
) -> SequentialResult:
    """The verdict of fraud that ends the watch, else the last one."""
    until = math.inf if given.seconds is None else time.monotonic() + given.seconds
    verdict = SequentialResult.UNDECIDED
    if watch.convicted:
        session.tell("an earlier watch convicted this provider, by the same evidence", "red")
        return SequentialResult.FRAUD
    try:
        while (began := time.monotonic()) < until:
            if fetches := next(source):
                verdict = _check(watch, fetches, session)
                if given.out is not None:
                    # A reader never sees half a report.
                    half = given.out.with_name(f".{given.out.name}.part")
                    write_json(half, watch.record())
                    half.replace(given.out)
                if verdict is SequentialResult.FRAUD:
                    break
            session.line.rest(f"{watch.chats} chats; the next check is in {given.every:g} s")
            time.sleep(max(0.0, min(began + given.every, until) - time.monotonic()))
    finally:
        watch.close()
    return SequentialResult.FRAUD if watch.convicted else verdict


def _check(watch: Watch, fetches: Sequence[Fetch], session: CommandSession) -> SequentialResult:
    """The verdict with new chats; undecided if one could not be had, which does not end a watch."""
    fresh: list[Conversation] = []
    for fetch in fetches:
        try:
            fresh.append(fetch())
        except ReportedError as error:
            watch.unreadable += 1
            session.tell(str(error), "red")
    verdict = SequentialResult.UNDECIDED
    if fresh:
        try:
            verdict = watch.add(fresh)
        except NodeError as error:
            # The log cannot be read now; these chats are checked with the next ones.
            session.tell(str(error), "red")
        else:
            if watch.last is not None:
                session.show(verdict, watch.last.lines())
                if watch.stays_honest:
                    session.tell("honest by earlier answers; those since then are too few to tell")
                    verdict = SequentialResult.HONEST
                if watch.unproved:
                    session.tell(f"over all answers: {watch.unproved}")
    if verdict is SequentialResult.HONEST and len(fresh) < len(fetches):
        return SequentialResult.UNDECIDED
    return verdict


def _asked(client: ReceiptClient, seed: str) -> Iterator[list[Fetch]]:
    """A chat of our own each time; no two are alike."""
    model, draw = client.model(), random.Random(seed)  # noqa: S311 - prompts, no secrets
    for number in itertools.count():
        body = request(model, draw.getrandbits(_PROMPT_BITS), TOKENS, greedy=number % 2 == 1)
        yield [partial(client.chat, f"chat {number}", body)]


def _kept(folder: Path, share: float, seed: str) -> Iterator[list[Fetch]]:
    """The chats that were added to ``folder`` since the last time, a ``share`` of them."""
    if not folder.is_dir():
        raise ReportedError(f"--chats: {folder} is no folder")
    known: set[Path] = set()
    draw = random.Random(seed)  # noqa: S311 - the provider has answered before

    def kept() -> list[Fetch]:
        new = sorted(set(folder.glob("*.json")) - known)
        known.update(new)
        return [partial(read, path) for path in new if draw.random() < share]

    return iter(kept, None)
