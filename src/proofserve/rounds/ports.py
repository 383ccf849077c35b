"""What a round needs of an engine and of an outbox, and what the API needs of rounds."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from proofserve.protocol.commitments import Opening
from proofserve.protocol.receipts.record import (
    FinishedAnswer,
    SignedEntry,
    SignedReceipt,
    SigningKey,
)
from proofserve.rounds.errors import Refusal, Refused
from proofserve.rounds.records import (
    CommittedRound,
    CompletedJob,
    Deferred,
    DistanceClaims,
    DistanceVerdict,
    EngineInfo,
    Finding,
    Job,
    JobView,
    Outcome,
    ProofBatch,
    RoundProgress,
    RoundSpec,
    StoredResult,
    Winner,
    Workload,
)
from proofserve.rounds.state import Move
from proofserve.rounds.status import EngineGauges, NodeTotals, OutboxGauges, ReceiptGauges, Status

# Computes the proofs of the given nonces. Calls may overlap; the engine runs them in order. Raises
# EngineFault (the computation failed; the engine still runs) and EngineGone.
Prove = Callable[[Sequence[int]], Awaitable[ProofBatch | Deferred]]


class ProofEngine(Protocol):
    @property
    def engine_info(self) -> EngineInfo:
        """What is deployed; constant while the engine runs."""

    @property
    def cores(self) -> int:
        """Engine cores that compute beside each other, each with its own chat; at least 1."""

    def session(
        self, work: Workload, core: int | None = None
    ) -> AbstractAsyncContextManager[Prove]:
        """Open a lease; the end of the context returns it and cancels deferred calls.

        All calls go to ``core``, an index below ``cores``. Without one the engine chooses, and
        chooses another core after a call that chat deferred.
        """

    async def gauges(self) -> EngineGauges: ...

    async def fit(self, work: Workload) -> None:
        """Choose anew the size of forwards of ``work`` unless chat is busy. Raises as ``Prove``."""


# Times a number of forwards of the nonces back to back; chat waits for all of them. Gives how many
# nonces were proved, and the seconds. Raises EngineFault (a forward failed; the engine still runs)
# and EngineGone.
Measure = Callable[[Workload, Sequence[int], int], Awaitable[tuple[int, float]]]


class AnsweringEngine(Protocol):
    """The engine whose answers get receipts, and what its sketches are made with."""

    @property
    def engine_info(self) -> EngineInfo: ...

    @property
    def sketch_key(self) -> str: ...

    @property
    def k_dim(self) -> int: ...

    async def finished_answers(self) -> list[FinishedAnswer]:
        """The answers that ended since the last call; waits for one. Raises EngineGone."""


class PublishedResults(Protocol):
    """What a node has stored, for the clients that read it. Methods raise OutboxUnavailable."""

    async def results(self, after: int, limit: int) -> list[StoredResult]: ...

    async def winners(self, round_id: str, limit: int) -> list[Winner]: ...

    async def committed_round(
        self, block_hash: str, public_key: str, round_id: str | None
    ) -> CommittedRound:
        """Raises Refused (UNKNOWN_ROUND, NOT_COMMITTED; SEVERAL_ROUNDS without an id)."""

    async def openings(self, committed: CommittedRound, nonces: Sequence[int]) -> list[Opening]:
        """In the order of ``nonces``. Raises Refused (UNKNOWN_NONCE, VECTORS_DELETED)."""

    async def probe(self) -> None:
        """Write and roll back. Raises OutboxUnavailable if that fails."""

    async def gauges(self) -> OutboxGauges: ...


class Outbox(PublishedResults, Protocol):
    async def push(self, url: str, about: CompletedJob | DistanceVerdict) -> None:
        """Queue the callback about a job or a verdict to ``url``. Raises OutboxUnavailable."""

    async def open_round(self, spec: RoundSpec) -> RoundProgress:
        """Store a round, or continue the stored one; close any other. Raises OutboxUnavailable."""

    async def interrupted(self) -> RoundSpec | None:
        """The open round: after a restart, the round that the earlier process was running."""

    async def record(
        self, round_id: str, next_index: int, findings: Sequence[Finding], failed: Mapping[int, str]
    ) -> None:
        """Store findings, failures (nonce to reason) and the lane's progress in one transaction.

        Raises OutboxUnavailable (the disk is full, for example): nothing was stored, and the caller
        may repeat the call.
        """

    async def close_round(self, round_id: str) -> None:
        """Mark the round stopped and make its undelivered results due for delivery at once."""


class NodeManager(Protocol):
    """The rounds, jobs and judgements of a node, as its routes use them.

    ``state.step`` decides which calls are legal; a refused call changes nothing. After the server
    began to shut down every call but ``stop`` raises Refused (SHUTTING_DOWN).
    """

    totals: NodeTotals
    """Counts over all rounds and jobs since the start of the process."""
    is_closing: bool = False
    """Whether the server shuts down."""

    async def configure(self, spec: RoundSpec, move: Move) -> None:
        """Configure ``spec``, by one of the moves INIT, INIT_VALIDATE, and START (then jobs wait).

        Raises Refused (ALREADY_GENERATING), and as ``generate`` for a START.
        """

    async def generate(self) -> None:
        """Start the configured round, or continue it; no change if it already generates.

        Raises Refused (NOT_INITIALISED, OTHER_PROTOCOL, LANE_UNSET) and OutboxUnavailable.
        """

    async def validate(self) -> None:
        """Stop generating, and judge claims. Raises Refused as ``generate``."""

    async def judge(self, claims: DistanceClaims, of_round: bool = True) -> DistanceVerdict:
        """Recompute ``claims`` by the configured round. In VALIDATING the verdict is also sent.

        One that is not ``of_round`` is neither sent nor counted in the round. Raises
        Refused (NOT_INITIALISED, OTHER_PROTOCOL), OutboxUnavailable (the callback could not be
        stored; nothing was counted) and as ``Computation.judge``.
        """

    async def stop(self) -> None:
        """End the running round, if any, and cancel the submitted jobs. Always allowed.

        Finished batches are stored before this returns, if the outbox can store them.
        """

    def status(self) -> Status: ...

    async def submit(self, job: Job) -> str:
        """Queue ``job`` and return its id. Raises Refused (QUEUE_FULL) and OutboxUnavailable."""

    async def run(self, job: Job) -> Outcome:
        """Compute ``job`` while the caller waits. Raises Refused (QUEUE_FULL) and EngineFault."""

    async def result(self, request_id: str) -> JobView:
        """Raises Refused (UNKNOWN_JOB) and OutboxUnavailable."""

    async def engine_gauges(self) -> EngineGauges:
        """The newest ones that the engine has given, with their age; those of now if it is free.

        Raises EngineGone and EngineFault (the engine has never answered, or reports a fault).
        """

    async def self_check(self) -> float:
        """Seconds of one small forward, with the time that chat and a round took before it.

        Raises Refused (CHAT_BUSY), EngineFault and EngineGone.
        """

    def require_open(self) -> None:
        if self.is_closing:
            raise Refused(
                Refusal.SHUTTING_DOWN, "the server is shutting down; ask again after its restart"
            )

    async def aclose(self) -> None:
        """End every task; a running round stays open in the outbox, for ``--resume``."""


# A signed receipt with its digest, which is made once.
NewReceipt = tuple[SignedReceipt, bytes]


class ReceiptStorage(Protocol):
    """Keeps receipts and their log. Methods raise OutboxUnavailable, and change nothing then."""

    async def add(self, receipts: Sequence[NewReceipt], without: Mapping[str, int]) -> int:
        """Store ``receipts`` and the counts of answers without one, in one transaction.

        The first receipt of a response and choice stays; another one is counted as
        ``repeated_id``, and the same one once more is ignored. Returns how many were stored.
        """

    async def log(self, key: SigningKey, url: str | None) -> SignedEntry | None:
        """Add an entry for stored receipts that have none, signed by ``key``.

        None if there are no such receipts; one entry may not hold all. Entries that no callback has
        yet are queued as one to ``url``.
        """

    async def of_response(self, response_id: str) -> list[SignedReceipt | None]:
        """The receipts of a response in the order of its choices; None for a deleted one."""

    async def entries(self, after: int, limit: int) -> list[SignedEntry]:
        """Entries of the log with an index above ``after``, in order."""

    async def gauges(self) -> ReceiptGauges: ...
