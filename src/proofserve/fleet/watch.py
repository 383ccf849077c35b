"""The fleet as this process knows it: the database as it was a moment ago, and what follows."""

import asyncio
import importlib.metadata
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from proofserve.api.node import Deployment
from proofserve.fleet.deployment import fleet_deployment
from proofserve.fleet.errors import StoreUnavailable
from proofserve.fleet.members.conditions import MemberCondition, Rules, StatusReader, conditions
from proofserve.fleet.records import Desired, FleetView, Lane, LaneProgress, Served
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification_records import VerificationView

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Overview:
    """One look at the database, and what each member is by it.

    ``lanes`` holds the lanes of the desired round, and all others that were not ended. ``newest``
    has the newest lane of the desired round by member, ended or not.
    """

    view: FleetView
    members: tuple[MemberCondition, ...]
    lanes: tuple[Lane, ...]
    newest: Mapping[str, LaneProgress]
    deployment: Deployment | None
    verification: VerificationView = field(default_factory=VerificationView)

    @property
    def desired(self) -> Desired:
        return self.view.desired

    @property
    def served(self) -> Served:
        """What the fleet serves, by what most of its members say of themselves."""
        if self.deployment is None:
            return Served()
        info = self.deployment.engine_info
        names = info.model_names
        return Served(info.facts.weights_digest, names[0] if names else None)

    @property
    def ready(self) -> tuple[MemberCondition, ...]:
        return tuple(each for each in self.members if each.is_ready)

    @property
    def why_not_ready(self) -> str | None:
        """Why the fleet can prove nothing, with the reasons of its members; None if it can."""
        if self.ready:
            return None
        if not self.members:
            return "the fleet has no member: name some with --member, --members-file or --dns"
        first = [f"{each.member.name} is {each.state}: {each.reason}" for each in self.members[:3]]
        more = f"; and {len(self.members) - 3} more" if len(self.members) > 3 else ""
        return f"no member of the fleet is ready. {'; '.join(first)}{more}"


class FleetWatch:
    """Reads the database each ``interval_s`` while ``run`` runs.

    ``limits`` has the fleet's own limits of requests. ``clock`` gives wall-clock seconds.
    """

    def __init__(
        self,
        store: FleetStore,
        rules: Rules,
        limits: Deployment,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._rules = rules
        self._limits = limits
        self._interval_s = interval_s
        self._clock = clock
        self._version = importlib.metadata.version("proofserve")
        self._statuses = StatusReader()
        self._reading = asyncio.Lock()
        self._read_at = time.monotonic()
        self._changed = asyncio.Event()
        self.error: str | None = None
        """Why the database could not be read the last time; None if it could."""
        self.current = Overview(FleetView(0.0, (), Desired(), ()), (), (), {}, None)

    @property
    def age_s(self) -> float:
        """Seconds since the database was read."""
        return time.monotonic() - self._read_at

    async def refresh(self) -> Overview:
        """Read the database now. Raises StoreUnavailable."""
        async with self._reading:
            began = time.monotonic()
            try:
                view, open_lanes = await self._store.view(), await self._store.open_lanes()
                verification = await self._store.verdicts.view()
            except StoreUnavailable as error:
                self.error = str(error)
                raise
            self.error, self._read_at = None, began
            self.current = self._overview(view, open_lanes, verification)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            return self.current

    async def next_change(self) -> None:
        """Wait until the database was read again."""
        await self._changed.wait()

    async def until(self, true: Callable[[Overview], bool], seconds: float) -> bool:
        """Wait at most ``seconds`` for an overview for which ``true`` holds; whether one came."""
        try:
            async with asyncio.timeout(seconds):
                while not true(self.current):
                    await self.next_change()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Read until cancelled, unless another call has just read."""
        while True:
            if (left_s := self._interval_s - self.age_s) > 0.0:
                await asyncio.sleep(left_s)
                continue
            try:
                await self.refresh()
            except StoreUnavailable as error:
                _logger.warning("the fleet's database cannot be read: %s", error)
            except Exception:
                self.error = "the database holds what this controller cannot read"
                _logger.exception("the fleet's database cannot be read")
            await asyncio.sleep(self._interval_s)

    def _overview(
        self, view: FleetView, open_lanes: list[Lane], verification: VerificationView
    ) -> Overview:
        known = {(lane.round_id, lane.lane): lane for lane in open_lanes}
        known |= {(e.lane.round_id, e.lane.lane): e.lane for e in view.lanes}
        lanes = tuple(known.values())
        statuses = self._statuses.statuses(view.members)
        found = conditions(view.members, statuses, view.desired, lanes, self._rules, self._clock())
        deployment = fleet_deployment(found, self._limits, self._version)
        # Lanes are given in the order of their numbers.
        newest = {each.lane.member_id: each for each in view.lanes}
        return Overview(view, found, lanes, newest, deployment, verification)
