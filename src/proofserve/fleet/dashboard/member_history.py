"""The rate of each member over the last hour, for its sparkline."""

import asyncio

from proofserve.dashboard.records import STEP_S, History, Trend
from proofserve.fleet.members.conditions import MemberCondition
from proofserve.fleet.watch import FleetWatch


class MemberHistory:
    """Adds a value for each member every ``STEP_S`` seconds while ``measure_for_ever`` runs."""

    def __init__(self, watch: FleetWatch) -> None:
        self._watch = watch
        self._rates: dict[str, History] = {}

    async def measure_for_ever(self) -> None:
        while True:
            self.measure()
            await asyncio.sleep(STEP_S)

    def measure(self) -> None:
        """Add one value for each member, and forget those that are members no more."""
        members = {each.member.id: each for each in self._watch.current.members}
        for id_ in self._rates.keys() - members.keys():
            del self._rates[id_]
        for id_, condition in members.items():
            self._rates.setdefault(id_, History()).add(rate_of(condition))

    def rate(self, member_id: str) -> Trend | None:
        history = self._rates.get(member_id)
        return history.trend() if history is not None else None


def rate_of(condition: MemberCondition) -> float | None:
    """Nonces per second that the member proves now; None while it proves no round, or is silent."""
    status = condition.status
    if not condition.answered or status is None or status.stats is None or not status.generates:
        return None
    return status.stats.recent_nonces_per_second
