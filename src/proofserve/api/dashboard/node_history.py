"""What a node's page shows of the past: its rate, and what happened in the round."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from proofserve.dashboard.records import STEP_S, History, Level, TimelineEvent, Trend
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


class _Seen(NamedTuple):
    """What one look at a round saw; the texts are reasons."""

    state: State | None
    paused: str | None
    error: str | None
    stall: str | None


_NOTHING = _Seen(None, None, None, None)
_RUNNING = (State.GENERATING, State.VALIDATING)


class NodeHistory:
    """Looks at ``status`` each second while ``watch`` runs, and whenever the page is shown.

    ``stall`` says why engine cores hang, ``clock`` gives Unix seconds.
    """

    def __init__(
        self,
        status: Callable[[], Status],
        stall: Callable[[], str | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._status = status
        self._stall = stall
        self._clock = clock
        self._rate = History()
        self._round_id: str | None = None
        self._seen = _NOTHING
        self._deferred_calls = 0
        self._events: deque[TimelineEvent] = deque(maxlen=_EVENTS)
        self.chat_holds_back = False
        """Whether chat deferred proofs in the last step."""
        self.started_at = self.rate_until = clock()
        """When the round was first seen, and when the last value of the rate was measured."""
        self.ended_at: float | None = None

    async def watch(self) -> None:
        for look in count():
            if look % _LOOKS_PER_STEP == 0:
                self.measure()
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> Status:
        """Note what has changed since the last look; returns what was seen."""
        status = self._status()
        round_id = status.spec.round_id if status.spec is not None else None
        if round_id != self._round_id:
            self._round_id, self._seen, self.ended_at = round_id, _NOTHING, None
            self._events.clear()
            self.started_at = self._clock()
        if round_id is not None:
            self._note(_Seen(status.state, status.paused_reason, status.error, self._stall()))
        return status

    def measure(self) -> None:
        """Add one value of the rate; one step has passed since the last one."""
        status = self._status()
        running, stats = status.state is State.GENERATING, status.stats
        self._rate.add(stats.recent_rate if running and stats is not None else None)
        self.rate_until = self._clock()
        calls = stats.deferred_calls if stats is not None else 0
        self.chat_holds_back = running and calls > self._deferred_calls
        self._deferred_calls = calls

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

    def _note(self, now: _Seen) -> None:
        """Add what differs from the last look."""
        before, self._seen = self._seen, now
        if now.state is not before.state and now.state is not None:
            self._add(_TEXT_OF[now.state])
            self.ended_at = None if now.state in _RUNNING else self._clock()
        if now.paused and now.paused != before.paused:
            self._add(f"paused: {now.paused}", Level.WARNING)
        elif before.paused and not now.paused and now.state in _RUNNING:
            self._add("goes on")
        if now.error and now.error != before.error:
            self._add(f"ended by a fault: {now.error}", Level.BAD)
        # The reason counts the seconds: it changes while the engine hangs.
        if now.stall and not before.stall:
            self._add(f"stalled: {now.stall}", Level.BAD)
        elif before.stall and not now.stall:
            self._add("the engine steps again")

    def _add(self, text: str, level: Level = Level.GOOD) -> None:
        self._events.append(TimelineEvent(at=self._clock(), text=text[:_MOST_TEXT], level=level))
