"""What a node has done since its start, over all rounds and jobs: only ever counted up."""

from collections import Counter
from collections.abc import Awaitable
from typing import Literal, TypeVar, get_args

from proofserve.rounds.errors import Refused
from proofserve.rounds.records import DistanceVerdict, Verdict

Work = Literal["round", "job", "validation"]
V = TypeVar("V", bound=Verdict | DistanceVerdict)


class NodeTotals:
    """Counts for whoever watches the node; nothing of the node's own decisions rests on them.

    ``nonces`` by what they were computed for and whether that gave a row; ``validations`` by how
    they ended; ``faults`` of engine calls made for rounds.
    """

    def __init__(self) -> None:
        # Zeros from the start: who watches a rate must see the first step.
        self.nonces: Counter[tuple[Work, str]] = Counter(
            {(work, outcome): 0 for work in get_args(Work) for outcome in ("proved", "failed")}
        )
        self.validations = Counter({"honest": 0, "fraud": 0, "error": 0})
        self.faults = 0

    def computed(self, work: Work, proved: int, failed: int) -> None:
        """So many nonces have an outcome."""
        self.nonces[work, "proved"] += proved
        self.nonces[work, "failed"] += failed

    async def judged(self, running: Awaitable[V]) -> V:
        """The verdict that ``running`` comes to, counted. A refusal began nothing, and is none."""
        try:
            verdict = await running
        except Refused:
            raise
        except Exception:
            self.validations["error"] += 1
            raise
        self.validations["fraud" if verdict.fraud_detected else "honest"] += 1
        return verdict
