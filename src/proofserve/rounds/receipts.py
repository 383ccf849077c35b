"""Takes finished answers from the engine, and has their receipts stored, logged and found."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import (
    FinishedAnswer,
    Receipt,
    SignedReceipt,
    SigningKey,
    token_hash,
)
from proofserve.rounds.errors import EngineFault, EngineGone, OutboxUnavailable, Refusal, Refused
from proofserve.rounds.ports import AnsweringEngine, NewReceipt, ReceiptStorage
from proofserve.rounds.records import EngineInfo
from proofserve.rounds.status import INVALID, NO_SKETCHES, ReceiptGauges
from proofserve.rounds.tasks import woken

_logger = logging.getLogger(__name__)

# Receipts of one transaction.
_BATCH = 256
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# More requests than this do not wait.
MOST_WAITS = 256


def receipt_of_answer(answer: FinishedAnswer, engine_info: EngineInfo, now_ms: int) -> Receipt:
    """What the node signs about ``answer``, which must have sketches.

    An answer cannot have ended after ``now_ms``, whatever another process' clock says. Raises
    ProtocolError if the answer has no receipt because its parts do not fit each other.
    """
    facts = engine_info.facts
    if answer.sketches is None or facts.weights_digest is None:
        raise ProtocolError("sketches", "a receipt needs sketches and a digest of the weights")
    for name, ids in (("prompt_ids", answer.prompt_ids), ("output_ids", answer.output_ids)):
        # They are u32 in the receipt's hashes.
        if ids and not 0 <= min(ids) <= max(ids) < 2**32:
            raise ProtocolError(name, "has a token id that is not in 0..2^32 - 1")
    return Receipt(
        response_id=answer.response_id,
        choice=answer.choice,
        model=engine_info.model_names[0],
        adapter=answer.adapter,
        weights_digest=facts.weights_digest,
        sampling=answer.sampling,
        prompt_tokens=len(answer.prompt_ids),
        prompt_sha256=token_hash(answer.prompt_ids),
        output_tokens=len(answer.output_ids),
        output_sha256=token_hash(answer.output_ids),
        sketch_key=answer.sketch_key,
        k_dim=answer.k_dim,
        sketches=answer.sketches,
        finish_reason=answer.finish_reason,
        versions=tuple(sorted(engine_info.versions.items())),
        created_ms=min(answer.created_ms, now_ms),
    )


class ReceiptService:
    """``run`` must be one task of the event loop; ``finish`` is called before that task ends.

    A stored receipt survives a crash; an answer counts as taken once it is stored. ``url`` is where
    entries of the log are posted, None for nowhere. ``clock`` gives wall-clock seconds. Raises
    ValueError for a model without a digest of its weights.
    """

    most_waiting_bytes = 64 * 1024 * 1024
    """Beyond so many no more answers are taken from the engine, which then bounds its own."""
    wait_s = 2.0
    """How long a request waits for a receipt that is not known: the answer may just have ended."""
    entry_every_s = 1.0

    def __init__(
        self,
        answers: AnsweringEngine,
        storage: ReceiptStorage,
        key: SigningKey,
        url: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if answers.engine_info.facts.weights_digest is None:
            raise ValueError(
                "receipts name the digest of the weights, and this checkpoint has none, because it"
                " has no safetensors files: convert it, or start without receipts"
            )
        self.answers = answers
        self._storage = storage
        self._key, self.public_key = key, key.public_key
        self.entries = storage.entries
        self._url = url
        self._clock = clock
        self._waiting: deque[FinishedAnswer] = deque()
        self._waiting_bytes = 0
        self._has_answers = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        # An earlier process may have stored receipts and not logged them.
        self._has_unlogged = True
        self._storing = asyncio.Lock()
        self._logging = asyncio.Lock()
        # Requests that wait for a receipt of a response, by what a receipt of it sets.
        self._arrivals: dict[asyncio.Event, str] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_for_ever(), name="proofserve-answers")
            tasks.create_task(self._store_for_ever(), name="proofserve-store-receipts")
            tasks.create_task(self._log_for_ever(), name="proofserve-log")

    async def finish(self) -> None:
        """Store and log what was taken from the engine, because the server ends."""
        try:
            while self._waiting:
                await self._store()
            await self._log()
        except OutboxUnavailable as error:
            text = "%d answers get no receipt, because the server ends: %s"
            _logger.error(text, len(self._waiting), error)  # noqa: TRY400 - one line is enough

    async def of_response(self, response_id: str) -> list[SignedReceipt]:
        """The receipts of a response in the order of its choices, each in the log.

        Waits up to ``wait_s`` for one that is not known. Raises OutboxUnavailable, and
        Refused (UNKNOWN_RECEIPT, RECEIPT_DELETED, WAITS_FULL, RECEIPT_NOT_LOGGED: stored already).
        """
        found = await self._storage.of_response(response_id)
        if not found:
            if len(self._arrivals) >= MOST_WAITS:
                text = f"{len(self._arrivals)} requests wait for receipts that are not known yet"
                raise Refused(Refusal.WAITS_FULL, text)
            came = asyncio.Event()
            self._arrivals[came] = response_id
            try:
                # Once more: it may have been stored meanwhile.
                found = await self._storage.of_response(response_id)
                if not found:
                    await woken(came, self.wait_s)
                    found = await self._storage.of_response(response_id)
            finally:
                del self._arrivals[came]
        if not found:
            raise Refused(
                Refusal.UNKNOWN_RECEIPT,
                "no answer with this id has a receipt, or it was deleted long ago; an answer gets"
                " its receipt when it has ended",
            )
        kept = [each for each in found if each is not None]
        if len(kept) < len(found):
            text = "the receipt is deleted: its time to live has passed"
            raise Refused(Refusal.RECEIPT_DELETED, text)
        if any(each.inclusion is None for each in kept):
            text = "the receipt is stored, and enters the log within a second"
            raise Refused(Refusal.RECEIPT_NOT_LOGGED, text)
        return kept

    async def gauges(self) -> ReceiptGauges:
        return replace(await self._storage.gauges(), waiting=len(self._waiting))

    # -- answers of the engine -------------------------------------------------------------------

    async def _take_for_ever(self) -> None:
        while True:
            await self._has_room.wait()
            try:
                answers = await self.answers.finished_answers()
            except EngineFault as error:
                _logger.warning("no answers for receipts, again in a second: %s", error)
                await asyncio.sleep(_FIRST_PAUSE_S)
            except EngineGone as error:
                _logger.warning("no more receipts: %s", error)
                return
            else:
                self._take(answers)

    def _take(self, answers: Sequence[FinishedAnswer]) -> None:
        self._waiting.extend(answers)
        self._waiting_bytes += sum(map(_size, answers))
        self._has_answers.set()
        if self._waiting_bytes > self.most_waiting_bytes:
            self._has_room.clear()

    async def _store_for_ever(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            await self._has_answers.wait()
            try:
                await self._store()
            except OutboxUnavailable as error:
                text = "%d answers wait for their receipts, again in %g s: %s"
                _logger.warning(text, len(self._waiting), pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                pause_s = _FIRST_PAUSE_S

    async def _store(self) -> None:
        """Store the receipts of the oldest answers that wait. Raises OutboxUnavailable."""
        async with self._storing:
            batch = [self._waiting[n] for n in range(min(_BATCH, len(self._waiting)))]
            # A thread, because the hashes and signatures of a batch take some ten milliseconds.
            receipts, without = await asyncio.to_thread(self._receipts, batch)
            await self._storage.add(receipts, without)
            self._has_unlogged = True
            for answer in batch:
                self._waiting.popleft()
                self._waiting_bytes -= _size(answer)
            if not self._waiting:
                self._has_answers.clear()
            if self._waiting_bytes <= self.most_waiting_bytes:
                self._has_room.set()
        stored = {signed.receipt.response_id for signed, _ in receipts}
        for came, response_id in self._arrivals.items():
            if response_id in stored:
                came.set()

    def _receipts(self, answers: Sequence[FinishedAnswer]) -> tuple[list[NewReceipt], Counter[str]]:
        """The signed receipts of ``answers``, and how many have none, by reason."""
        made: list[NewReceipt] = []
        without: Counter[str] = Counter()
        now_ms = int(self._clock() * 1000)
        for answer in answers:
            if answer.sketches is None:
                without[NO_SKETCHES] += 1
                continue
            try:
                receipt = receipt_of_answer(answer, self.answers.engine_info, now_ms)
                digest = receipt.digest
                signature = self._key.sign(digest)
            except ValueError as error:
                _logger.warning("answer %r gets no receipt: %s", answer.response_id, error)
                without[INVALID] += 1
            else:
                made.append((SignedReceipt(receipt, self.public_key, signature), digest))
        return made, without

    # -- the log -----------------------------------------------------------------------------------

    async def _log_for_ever(self) -> None:
        while True:
            try:
                await self._log()
            except OutboxUnavailable as error:
                _logger.warning("receipts enter the log later: %s", error)
            await asyncio.sleep(self.entry_every_s)

    async def _log(self) -> None:
        """Add entries until no stored receipt is without one. Raises OutboxUnavailable."""
        async with self._logging:
            # Entries may also wait for a callback, until the one before is delivered.
            if not self._has_unlogged and self._url is None:
                return
            # Before the calls: a receipt that is stored meanwhile may need another entry.
            self._has_unlogged = False
            try:
                while await self._storage.log(self._key, self._url) is not None:
                    continue
            except BaseException:
                self._has_unlogged = True
                raise


def _size(answer: FinishedAnswer) -> int:
    tokens = len(answer.prompt_ids) + len(answer.output_ids)
    # Token ids have 8 bytes each; besides them and the sketches an answer takes about a kilobyte.
    return 1024 + 8 * tokens + len(answer.sketches or b"")
