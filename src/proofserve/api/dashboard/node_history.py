"""What a node's page shows of the past: its rate, and what happened in the round."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from proofserve.dashboard.history import STEP_S, History
from proofserve.dashboard.records import Level, TimelineEvent, Trend
from proofserve.rounds.state import State
from proofserve.rounds.status import Status

# Seconds between two looks at the round, and the looks between two values of the rate.
LOOK_S = 1.0
_LOOKS_PER_STEP = round(STEP_S / LOOK_S)
# The newest events of a round; older ones are in the log.
_EVENTS = 40
# Values of the round's chart: half an hour.
_CHART = 360
_TEXT_OF = {
    State.GENERATING: "generating",
    State.VALIDATING: "judging claims",
    State.STOPPED: "stopped",
    State.IDLE: "configured",
}
# Most characters of a reason; the whole text is in /status and in the log.
_MOST_TEXT = 300


class NodeHistory:
    """Looks at ``status`` once a second while ``watch`` runs. ``clock`` gives Unix seconds."""

    def __init__(
        self, status: Callable[[], Status], clock: Callable[[], float] = time.time
    ) -> None:
        self._status = status
        self._clock = clock
        self._rate = History()
        self._looks = 0
        self._round_id: str | None = None
        self._seen: tuple[State, str | None, str | None] | None = None
        self._deferred_calls = 0
        self._events: deque[TimelineEvent] = deque(maxlen=_EVENTS)
        self.chat_holds_back = False
        """Whether chat deferred proofs in the last step."""
        self.started_at = self.rate_until = clock()
        """When the round was first seen, and when the last value of the rate was measured."""
        self.ended_at: float | None = None

    async def watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        status = self._status()
        if self._looks % _LOOKS_PER_STEP == 0:
            self._measure(status)
        self._looks += 1
        round_id = status.spec.round_id if status.spec is not None else None
        if round_id != self._round_id:
            self._round_id, self._seen, self.ended_at = round_id, None, None
            self._events.clear()
            self.started_at = self._clock()
        seen = status.state, status.paused_reason, status.error
        if round_id is not None and seen != self._seen:
            self._note(seen)
            self._seen = seen

    def rate(self) -> Trend:
        """The newest minutes, for a sparkline."""
        return self._rate.trend()

    def round_rate(self) -> Trend:
        """Since the round began, at most half an hour."""
        since = int((self._clock() - self.started_at) / STEP_S) + 1
        return self._rate.trend(min(since, _CHART))

    @property
    def events(self) -> tuple[TimelineEvent, ...]:
        """What happened in the round, oldest first."""
        return tuple(self._events)

    def _measure(self, status: Status) -> None:
        running = status.state is State.GENERATING
        stats = status.stats
        self._rate.add(stats.recent_rate if running and stats is not None else None)
        self.rate_until = self._clock()
        calls = stats.deferred_calls if stats is not None else 0
        self.chat_holds_back = running and calls > self._deferred_calls
        self._deferred_calls = calls

    def _note(self, seen: tuple[State, str | None, str | None]) -> None:
        state, paused, error = seen
        before, was_paused, old_error = self._seen or (None, None, None)
        if state is not before:
            self._add(_TEXT_OF[state])
            running = state in (State.GENERATING, State.VALIDATING)
            self.ended_at = None if running else self._clock()
        if paused and paused != was_paused:
            self._add(f"paused: {paused}", Level.WARNING)
        elif was_paused and not paused and state is State.GENERATING:
            self._add("goes on")
        if error and error != old_error:
            self._add(f"ended by a fault: {error}", Level.BAD)

    def _add(self, text: str, level: Level = Level.GOOD) -> None:
        self._events.append(TimelineEvent(at=self._clock(), text=text[:_MOST_TEXT], level=level))
