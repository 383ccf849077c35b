"""What a fleet has stored, for the routes of a node. Members keep vectors of committed rounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from proofserve.fleet.members.client import MemberClient, MemberError
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.watch import FleetWatch
from proofserve.protocol.commitments import CommittedBatch, Opening
from proofserve.rounds.errors import (
    EngineFault,
    NotCommitted,
    Refused,
    SeveralRounds,
    UnknownNonce,
    UnknownRound,
    VectorsDeleted,
)
from proofserve.rounds.records import CommittedRound, StoredResult, Winner
from proofserve.rounds.status import OutboxGauges
from proofserve.wire.records import Hash, HashPath, Whole

_ERRORS: Mapping[int, type[Refused]] = {404: UnknownNonce, 410: VectorsDeleted}


@dataclass(frozen=True, slots=True)
class _MembersRound(CommittedRound):
    """A member's round of a lane, or of a part of it, and the body of ``/open`` that names it."""

    member_id: str
    order: Mapping[str, str]


class _Opened(BaseModel):
    nonce: Whole
    vector_b64: str
    index: Whole
    first_index: Whole
    count: int = Field(ge=1)
    root: Hash
    path: HashPath

    @property
    def opening(self) -> Opening:
        # The answer of /open shows no previous root.
        batch = CommittedBatch(self.first_index, self.count, self.root, None)
        return Opening(self.nonce, self.vector_b64, self.index, batch, self.path)


class _Openings(BaseModel):
    openings: list[_Opened]


_OPENINGS = TypeAdapter(_Openings)


class FleetResults:
    """As ``PublishedResults``, from ``store``.

    Each lane of a round with roots is a committed round of its own. Its id is that of the member's
    round, which the callback with its roots names. A member that is a fleet has several in a lane.
    """

    def __init__(
        self, store: FleetStore, watch: FleetWatch, client: Callable[[str], MemberClient]
    ) -> None:
        self._store = store
        self._watch = watch
        self._client = client

    async def results(self, after: int, limit: int) -> list[StoredResult]:
        return await self._store.results(after, limit)

    async def winners(self, round_id: str, limit: int) -> list[Winner]:
        return await self._store.winners(round_id, limit)

    async def probe(self) -> None:
        await self._store.probe()

    async def gauges(self) -> OutboxGauges:
        return await self._store.gauges()

    async def committed_round(
        self, block_hash: str, public_key: str, round_id: str | None
    ) -> CommittedRound:
        about = f"block {block_hash!r} and key {public_key!r}"
        rounds = await self._store.rounds_of_block(block_hash, public_key)
        if not rounds:
            raise UnknownRound(f"there is no round of {about}")
        committed = [each for each in rounds if each.spec.commits_roots]
        if not committed:
            raise NotCommitted(f"the rounds of {about} publish vectors, not roots")
        found = await self._store.roots(committed, round_id)
        if not found:
            raise UnknownRound(f"no member has committed to nonces of {about} in round {round_id}")
        if round_id is None and len(found) > 1:
            ids = ", ".join(each.round_id for each in found[:20])
            raise SeveralRounds(f"give one of these as round_id: {ids}")
        order = {"block_hash": block_hash, "public_key": public_key, "round_id": found[0].round_id}
        return _MembersRound(
            found[0].round_id, found[0].lane, found[0].committed, found[0].member_id, order
        )

    async def openings(self, committed: CommittedRound, nonces: Sequence[int]) -> list[Opening]:
        """As the port. Raises EngineFault if the member of the lane cannot be asked."""
        if not isinstance(committed, _MembersRound):
            raise UnknownRound(f"round {committed.round_id} is not one of this fleet")
        members = {each.member.id: each.member for each in self._watch.current.members}
        member = members.get(committed.member_id)
        if member is None:
            raise EngineFault(
                f"the vectors of round {committed.round_id} are gone with the member that had them"
            )
        body = {**committed.order, "nonces": list(nonces)}
        try:
            answer = await self._client(member.url).open_vectors(body)
            opened = {
                each.nonce: each.opening for each in _OPENINGS.validate_python(answer).openings
            }
            return [opened[nonce] for nonce in nonces]
        except MemberError as error:
            if refused := _ERRORS.get(error.status or 0):
                raise refused(str(error)) from error
            raise EngineFault(f"member {member.name}: {error}") from error
        except (ValidationError, KeyError) as error:
            raise EngineFault(f"member {member.name} answered nonsense to POST /open") from error
