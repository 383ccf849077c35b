"""In the engine core: gathers ended answers and their rows, and answers the API process with them.

While chat runs, answers wait for ``COLLECT_S``, so that one question to the workers serves many;
it is asked after a step and its reply is read after the next one. As soon as the core is idle
everything is collected. All methods run on the core's loop thread.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

from proofserve.engines.receipts.compat_answers import EndedAnswer, WatchedCore
from proofserve.engines.receipts.tap import Rows

_logger = logging.getLogger(__name__)

# Shortest time between two collections while chat runs, seconds.
COLLECT_S = 0.2
# Answers that are kept while no API process asks for them; the oldest are dropped first.
MOST_ANSWERS = 4096
# Answers of one collection.
MOST_COLLECTED = 256


class AnswerCollector:
    def __init__(self, core: WatchedCore, now: Callable[[], float] = time.monotonic) -> None:
        self._core, self._now = core, now
        self._ended: deque[EndedAnswer] = deque()
        self._dropped = 0
        self._caller: Future[dict[str, Any]] | None = None
        self._asked: tuple[list[EndedAnswer], Callable[[], Rows]] | None = None
        self._asked_at = -COLLECT_S
        self._awaits_idle = False

    def wait(self) -> "Future[dict[str, Any]]":
        """The Future completes with ``answers``, at least one, and ``dropped``.

        ``dropped`` counts the answers that were dropped since the engine's start. There is one
        caller: an earlier call has lost its client, and is answered without answers.
        """
        if self._caller is not None:
            self._caller.set_result(self._reply([]))
        self._caller = Future()
        self._await_idle()
        return self._caller

    def ended(self, answer: EndedAnswer) -> None:
        self._ended.append(answer)
        if len(self._ended) > MOST_ANSWERS:
            self._ended.popleft()
            self._dropped += 1
        self._await_idle()

    def stepped(self) -> None:
        """Chat had a step."""
        if not self._answer() and self._is_due() and self._now() - self._asked_at >= COLLECT_S:
            self._ask()

    def _is_due(self) -> bool:
        return self._caller is not None and bool(self._ended)

    def _await_idle(self) -> None:
        if self._is_due() and not self._awaits_idle:
            self._awaits_idle = True
            self._core.call_when_idle(self._on_idle)

    def _on_idle(self) -> None:
        self._awaits_idle = False
        if self._asked is None and self._is_due():
            self._ask()
        self._answer()

    def _ask(self) -> None:
        batch = [self._ended.popleft() for _ in range(min(MOST_COLLECTED, len(self._ended)))]
        alive = [*self._core.unfinished(), *(each.request_id for each in self._ended)]
        self._asked_at = self._now()
        self._asked = batch, self._core.fetch_rows([each.wanted for each in batch], alive)

    def _answer(self) -> bool:
        """Read what the workers were asked for and complete the call; False if nothing was."""
        if self._asked is None or self._caller is None:
            return False
        (batch, read), caller = self._asked, self._caller
        self._asked = self._caller = None
        rows: Rows
        try:
            rows = read()
        except Exception:
            # An error here would end the engine; the answers are handed over without sketches.
            _logger.exception(
                "the workers did not hand over the sketches of %d answers", len(batch)
            )
            rows = [None] * len(batch)
        pairs = zip(batch, rows, strict=True)
        caller.set_result(self._reply([replace(each, sketches=found) for each, found in pairs]))
        return True

    def _reply(self, answers: Sequence[EndedAnswer]) -> dict[str, Any]:
        return {"answers": [asdict(each) for each in answers], "dropped": self._dropped}
