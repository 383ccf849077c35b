"""A client of one node, what the node answered, and what it owes."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import httpx

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import PUBLIC_KEY_BYTES
from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.http import TIMEOUT_S, JsonClient, required
from proofserve.remote.records import AnyWork, DistanceWork, Judgement, Work, record_of
from proofserve.reports import NodeError, ReportedError, TooSlowError
from proofserve.rounds.records import StoredResult, Winner
from proofserve.wire import PROOFS
from proofserve.wire.records import result_of
from proofserve.wire.signed import ANSWER_HEADER, SignedAnswer, answer_with


@dataclass(slots=True)
class Transcript:
    """The successful answers of one node in their order; ``unsigned`` has what it did not sign."""

    signed: list[SignedAnswer] = field(default_factory=list)
    unsigned: list[SignedAnswer] = field(default_factory=list)

    def forget(self) -> None:
        self.signed.clear()
        self.unsigned.clear()

    def hear(self, response: httpx.Response) -> None:
        """Keep a successful answer."""
        asked, body = response.request, response.content
        about = asked.method, asked.url.raw_path.decode("ascii"), asked.content, body
        unsigned = SignedAnswer(*about, 0, bytes(PUBLIC_KEY_BYTES), b"")
        try:
            answer = answer_with(response.headers.get(ANSWER_HEADER, ""), *about)
        except ProtocolError:
            answer = unsigned
        if answer.is_signed:
            self.signed.append(answer)
        else:
            self.unsigned.append(unsigned)


def replaying(answers: Sequence[SignedAnswer]) -> httpx.MockTransport:
    """Answers requests as a node did; 404 for one that it was not asked, or not so often."""
    known: defaultdict[tuple[str, str, bytes], deque[bytes]] = defaultdict(deque)
    for each in answers:
        known[each.method, each.target, each.request].append(each.body)

    def answer(request: httpx.Request) -> httpx.Response:
        target = request.url.raw_path.decode("ascii")
        if not (left := known[request.method, target, request.content]):
            return httpx.Response(404, text="the bundle has no such answer")
        headers = {"Content-Type": "application/json"}
        return httpx.Response(200, content=left.popleft(), headers=headers)

    return httpx.MockTransport(answer)


class NodeClient(JsonClient):
    """Blocking calls to the node at ``url``. Each raises NodeError with the node's own text.

    What it answers is kept in the ``transcript``; with ``replayed`` these are its answers.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        transcript: Transcript | None = None,
        replayed: httpx.MockTransport | None = None,
    ) -> None:
        super().__init__(url, api_key, timeout_s, replayed)
        self._transcript = transcript

    def models(self) -> list[str]:
        return [model["id"] for model in self._call("GET", "/v1/models")["data"]]

    def versions(self) -> dict[str, str]:
        return dict(self._call("GET", f"{PROOFS}/versions")["versions"])

    def kernels(self) -> dict[str, str]:
        """What the node says of its kernels: dtypes, ranks, processor, versions; none need be."""
        said = self._call("GET", f"{PROOFS}/versions")
        found = {**(said.get("versions") or {}), **(said.get("kernels") or {})}
        return {name: text for name, text in found.items() if isinstance(text, str)}

    def weights_digest(self) -> str | None:
        """Of the served checkpoint; None if the node does not know it, or is not ours."""
        digest = self._call("GET", f"{PROOFS}/versions").get("weights_digest")
        return digest if isinstance(digest, str) else None

    def describe(self) -> Mapping[str, Any]:
        """The answer of ``GET /status``."""
        found: Mapping[str, Any] = self._call("GET", f"{PROOFS}/status")
        return found

    def start_round(self, work: AnyWork) -> None:
        self._post("init/generate", work.body)

    def stop(self) -> None:
        self._post("stop")

    @contextmanager
    def round(self, work: AnyWork, path: str = "init/generate") -> Iterator[None]:
        self._post(path, work.body)
        try:
            yield
        finally:
            self.stop()

    def artifacts(self, work: Work, nonces: Sequence[int]) -> list[Claim]:
        """Compute the vectors of ``nonces``. Raises NodeError if one of them failed."""
        answer = self._post("generate", _computed(work, nonces))
        if failed := answer.get("failed"):
            raise NodeError(f"the node computed no vector for {failed[0]}")
        return [Claim(a["nonce"], a["vector_b64"]) for a in answer["artifacts"]]

    def answer_within(self, work: Work, nonces: Sequence[int], seconds: float) -> bytes:
        """The answer about the vectors of ``nonces`` as it came.

        Raises TooSlowError unless all of it came within ``seconds``, and NodeError.
        """
        path = f"{PROOFS}/generate"
        answer = self.send_within("POST", path, _computed(work, nonces), seconds)
        return self._heard(required(answer, f"POST {self.url}{path}")).content

    def judging(self, work: DistanceWork) -> AbstractContextManager[None]:
        return self.round(work, "init/validate")

    def judge(self, work: DistanceWork, winners: Sequence[Winner]) -> Judgement:
        """Have the node judge ``winners`` by its round. Raises NodeError if it leaves one out."""
        body = {
            "public_key": work.public_key,
            "block_hash": work.block_hash,
            "block_height": work.block_height,
            "nonces": [winner.nonce for winner in winners],
            "dist": [winner.distance for winner in winners],
            "node_id": 0,
        }
        judgement = record_of(Judgement, self._post("validate", body))
        computed = len(judgement.computed_distances)
        if computed != len(winners):
            raise NodeError(f"the node computed {computed} of {len(winners)} distances")
        return judgement

    def results(self, after: int = 0, limit: int = 10_000) -> list[StoredResult]:
        answer = self._call("GET", f"{PROOFS}/results?after={after}&limit={limit}")
        return [result_of(row) for row in answer["results"]]

    def open_vectors(
        self, block_hash: str, public_key: str, round_id: str, nonces: Sequence[int]
    ) -> Sequence[Any]:
        """The openings as the node sent them. An answer in another form has none."""
        body = {
            "block_hash": block_hash,
            "public_key": public_key,
            "round_id": round_id,
            "nonces": list(nonces),
        }
        try:
            answer = self._post("open", body)
        except ValueError:
            # Not JSON.
            return ()
        openings = answer.get("openings") if isinstance(answer, dict) else None
        return openings if isinstance(openings, list) else ()

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._call("POST", f"{PROOFS}/{path}", body)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of the answer. Raises ValueError for another one."""
        return self._heard(self.good(method, path, body)).json()

    def _heard(self, response: httpx.Response) -> httpx.Response:
        if self._transcript is not None:
            self._transcript.hear(response)
        return response


def _computed(work: Work, nonces: Sequence[int]) -> dict[str, Any]:
    """The body that asks for the vectors of ``nonces``."""
    return {**work.body, "nonces": list(nonces), "wait": True}


class BoundedClient(NodeClient):
    """For a node that may cheat: a call ends after ``timeout_s``, and a long answer is refused."""

    def send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        try:
            return self.send_within(method, path, body, self._http.timeout.read or TIMEOUT_S)
        except TooSlowError as error:
            text = f"{method} {self.url}{path}: {error}"
            raise NodeError(text) from httpx.ReadTimeout(text)


# What a node may send instead of the fields that it owes.
_NONSENSE: Final = (KeyError, IndexError, AttributeError, TypeError, ValueError, RecursionError)


class Unproved(StrEnum):
    """Why a prover has not proved what it owed. None of these is fraud, and none clears."""

    LATE = "late"
    """The node may serve chat, or a round, or be slow."""
    PARTLY = "partly answered"
    """Other nonces than those asked for, or not all of them."""
    OTHER_BLOCK = "another block"
    """The answer is, by its own words, for another block or key."""
    REFUSED = "refused"
    """An error status: a budget, another model or shape, a wrong key, deleted vectors."""
    UNREACHABLE = "not reached"
    UNREADABLE = "unreadable"
    """The answer is none of a node, or has another shape than what was asked for."""
    OTHER_WEIGHTS = "another digest"
    """The node says itself that it serves another checkpoint."""
    OTHER_KEY = "another key"
    """The answer is not signed by the key that the validator knows to be the node's."""
    OTHER_BITS = "other bits"
    """Most members of its fleet have equal bits, and it has others though it says it is alike."""
    OVERLAPPING = "overlapping roots"
    """A nonce is under two roots of one round."""
    UNDELIVERED = "not delivered"
    """Nonces of its lane below others that came; the source cannot say who lost them."""
    INTERRUPTED = "interrupted"
    """The validator ended before the answer came, or can judge it no more."""


class UnprovedError(ReportedError):
    """A prover owes an answer; ``seconds`` passed until it, or the deadline, if one was sent."""

    def __init__(self, kind: Unproved, text: str, seconds: float | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class Withheld:
    """A part of what a prover owed, which it did not show; ``text`` says what, and why."""

    kind: Unproved
    text: str


def unproved_by(error: NodeError) -> UnprovedError:
    """What the failure of a call to the prover's node means."""
    kind = Unproved.UNREACHABLE if error.status is None else Unproved.REFUSED
    if isinstance(error.__cause__, httpx.ReadTimeout):
        kind = Unproved.LATE
    return UnprovedError(kind, str(error))


@contextmanager
def owed_by(url: str) -> Iterator[None]:
    """What the prover's node at ``url`` must answer: its failures raise UnprovedError."""
    try:
        yield
    except NodeError as error:
        raise unproved_by(error) from error
    except _NONSENSE as error:
        text = f"{url} does not answer as a node: {error!r}"
        raise UnprovedError(Unproved.UNREADABLE, text) from error
