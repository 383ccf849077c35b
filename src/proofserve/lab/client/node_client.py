"""A client of one proof node: the proof endpoints and what vLLM says about itself."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from proofserve.lab.client.errors import NodeError
from proofserve.lab.client.records import (
    AnyWork,
    BareSpeed,
    DistanceWork,
    Judgement,
    NodeStatus,
    Work,
)
from proofserve.protocol.comparison import Claim
from proofserve.rounds.records import Artifact, StoredResult, Verdict, Winner
from proofserve.rounds.status import EngineGauges
from proofserve.wire.paths import PROOFS
from proofserve.wire.records import artifact_record, result_of

# A waiting /generate stands in line behind everything else that the engine has to do.
TIMEOUT_S = 300.0
CONNECT_S = 5.0
LONGEST_TEXT = 500


class NodeClient:
    """Blocking calls to the node at ``url``. Every failure is a NodeError with the node's text.

    ``api_key`` is for a node that asks for one.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=self.url, timeout=timeout, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Names under which the server serves its model."""
        return [model["id"] for model in self._call("GET", "/v1/models")["data"]]

    def versions(self) -> dict[str, str]:
        """Versions of what runs on the node, by name."""
        return dict(self._call("GET", f"{PROOFS}/versions")["versions"])

    def status(self) -> NodeStatus:
        """What the node does now. Answered between two forwards, so it may take one."""
        return NodeStatus.read(self.describe())

    def describe(self) -> Mapping[str, Any]:
        """All of ``GET /status``."""
        found: Mapping[str, Any] = self._call("GET", f"{PROOFS}/status")
        return found

    def engine(self) -> EngineGauges:
        """The counters inside the engine."""
        gauges = self.status().engine
        if gauges is None:
            raise NodeError(f"{self.url} shows no engine gauges; is its engine alive?")
        return gauges

    def start_round(self, work: AnyWork) -> None:
        """Start generating."""
        self._call("POST", f"{PROOFS}/init/generate", work.body)

    def stop(self) -> None:
        """End the round, if there is one."""
        self._call("POST", f"{PROOFS}/stop")

    @contextmanager
    def round(self, work: AnyWork) -> Iterator[None]:
        """A round that runs until the context ends, however it ends."""
        self.start_round(work)
        try:
            yield
        finally:
            self.stop()

    def artifacts(self, work: Work, nonces: Sequence[int]) -> list[Artifact]:
        """Compute the vectors of ``nonces``. A nonce without one is a NodeError."""
        body = {**work.body, "nonces": list(nonces), "wait": True}
        answer = self._call("POST", f"{PROOFS}/generate", body)
        if failed := answer.get("failed"):
            raise NodeError(f"the node computed no vector for {failed[0]}")
        return [Artifact(a["nonce"], a["vector_b64"]) for a in answer["artifacts"]]

    def validate(self, work: Work, claims: Sequence[Claim]) -> Verdict:
        """Have the node recompute what ``claims`` say, and judge it by the default test."""
        body = {
            **work.body,
            "nonces": [claim.nonce for claim in claims],
            "wait": True,
            "validation": {"artifacts": [artifact_record(c.nonce, c.vector_b64) for c in claims]},
        }
        answer = self._call("POST", f"{PROOFS}/generate", body)
        return Verdict(
            n_total=answer["n_total"],
            n_mismatch=answer["n_mismatch"],
            mismatch_nonces=tuple(answer["mismatch_nonces"]),
            p_value=answer["p_value"],
            fraud_detected=answer["fraud_detected"],
        )

    def init(self, work: DistanceWork) -> None:
        """Configure a round that does nothing yet."""
        self._call("POST", f"{PROOFS}/init", work.body)

    def phase_generate(self) -> None:
        """Let the configured round generate."""
        self._call("POST", f"{PROOFS}/phase/generate")

    def phase_validate(self) -> None:
        """Let the configured round judge; it stores what it has generated."""
        self._call("POST", f"{PROOFS}/phase/validate")

    def init_validate(self, work: DistanceWork) -> None:
        """Configure a round by which ``judge`` judges."""
        self._call("POST", f"{PROOFS}/init/validate", work.body)

    @contextmanager
    def judging(self, work: DistanceWork) -> Iterator[None]:
        """A round that judges until the context ends, however it ends."""
        self.init_validate(work)
        try:
            yield
        finally:
            self.stop()

    def judge(self, work: DistanceWork, winners: Sequence[Winner]) -> Judgement:
        """Have the node recompute the distances of ``winners``, and judge them by its round.

        An answer that leaves one of them out is a NodeError.
        """
        body = {
            "public_key": work.public_key,
            "block_hash": work.block_hash,
            "block_height": work.body["block_height"],
            "nonces": [winner.nonce for winner in winners],
            "dist": [winner.distance for winner in winners],
            "node_id": 0,
        }
        answer = self._call("POST", f"{PROOFS}/validate", body)
        computed = tuple(answer["computed_distances"])
        if len(computed) != len(winners):
            raise NodeError(f"the node computed {len(computed)} of {len(winners)} distances")
        return Judgement(
            computed=computed,
            n_invalid=answer["n_invalid"],
            probability_honest=answer["probability_honest"],
            fraud_detected=answer["fraud_detected"],
        )

    def results(self, after: int = 0, limit: int = 10_000) -> list[StoredResult]:
        """Results with ``seq > after``, oldest first."""
        path = f"{PROOFS}/results?after={after}&limit={limit}"
        rows = self._call("GET", path)["results"]
        return [result_of(row) for row in rows]

    def last_seq(self, after: int = 0) -> int:
        """The number of the newest result, ``after`` if there is none beyond it."""
        while rows := self.results(after):
            after = rows[-1].seq
        return after

    def measure(self, work: AnyWork, forwards: int) -> BareSpeed:
        """Bare forwards back to back, timed inside the engine; needs ``--poc-measure``."""
        body = {
            "block_hash": work.block_hash,
            "public_key": work.public_key,
            **work.measured,
            "batch_size": work.batch_size,
            "forwards": forwards,
        }
        answer = self._call("POST", f"{PROOFS}/measure", body)
        return BareSpeed(
            nonces_per_second=answer["nonces_per_second"],
            seconds_per_forward=answer["seconds_per_forward"],
            sequences=answer["sequences"],
        )

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise NodeError(f"{method} {self.url}{path}: {reason}") from error
        if response.is_error:
            text = response.text[:LONGEST_TEXT]
            raise NodeError(f"{method} {self.url}{path}: {response.status_code} {text}")
        return response.json()
