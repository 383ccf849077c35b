"""The fleet as this process knows it: the database as it was a moment ago, and what follows."""

import asyncio
import importlib.metadata
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from proofserve.api.node import Deployment
from proofserve.fleet.errors import StoreUnavailable
from proofserve.fleet.members.conditions import MemberCondition, Rules, conditions
from proofserve.fleet.records import DesiredState, FleetModel, FleetView, Lane, MemberState
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification_records import VerificationView
from proofserve.protocol.model import AllowedTokens
from proofserve.protocol.scheme import ModelFacts
from proofserve.rounds.records import EngineInfo

_logger = logging.getLogger(__name__)

_LEAST_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Overview:
    """One look at the database, and what each member is by it.

    ``lanes`` holds all lanes of the desired round, and those of earlier rounds that are still open.
    ``newest`` has the newest lane of the desired round by member, ended or not.
    """

    view: FleetView
    members: tuple[MemberCondition, ...]
    lanes: tuple[Lane, ...]
    newest: Mapping[str, Lane]
    deployment: Deployment | None
    verification: VerificationView = field(default_factory=VerificationView)

    @property
    def desired(self) -> DesiredState:
        return self.view.desired

    @property
    def served(self) -> FleetModel:
        """What the fleet serves, by what most of its members say of themselves."""
        if self.deployment is None:
            return FleetModel()
        info = self.deployment.engine_info
        names = info.model_names
        return FleetModel(info.facts.weights_digest, names[0] if names else None)

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
        self._reading = asyncio.Lock()
        self._read_at = time.monotonic()
        self._changed = asyncio.Event()
        self.error: str | None = None
        """Why the database could not be read the last time; None if it could."""
        self.current = Overview(FleetView(0.0, (), DesiredState(), ()), (), (), {}, None)

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
        known |= {(lane.round_id, lane.lane): lane for lane in view.lanes}
        lanes = tuple(known.values())
        found = conditions(view.members, view.desired, lanes, self._rules, self._clock())
        deployment = fleet_deployment(found, self._limits, self._version)
        # Lanes are given in the order of their numbers.
        newest = {lane.member_id: lane for lane in view.lanes}
        return Overview(view, found, lanes, newest, deployment, verification)


def fleet_deployment(
    found: Sequence[MemberCondition], limits: Deployment, version: str
) -> Deployment | None:
    """What every member that is not refused can do; None before the first one has answered.

    A fixed scheme, seq_len or k_dim is the same on all of them, because unequal ones are refused.
    ``limits`` has the fleet's own limits of requests, ``version`` is its version of proofserve.
    """
    deployed = [
        each.deployment
        for each in sorted(found, key=lambda each: (each.member.added_at, each.member.id))
        if each.state is not MemberState.REFUSED and each.deployment is not None
    ]
    if not deployed:
        return None
    first = deployed[0]
    # The names under which every member serves the model, in the order of the first one.
    names = tuple(name for name in first.models if all(name in each.models for each in deployed))
    # Only the number of token ids counts here: members draw prompts, the fleet does not.
    count = min(each.token_ids for each in deployed)
    tokens = AllowedTokens(((0, count),)) if count >= _LEAST_TOKENS else None
    info = EngineInfo(
        model_names=names,
        facts=ModelFacts(first.hidden_size, first.weights_digest, tokens),
        max_seq_len=min(each.max_seq_len for each in deployed),
        versions={**first.versions, "proofserve": version},
    )
    return replace(
        limits, engine_info=info, scheme=first.scheme, seq_len=first.seq_len, k_dim=first.k_dim
    )
