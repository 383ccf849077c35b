"""A client of one node: the proof API, vLLM's list of models, and waiting with a timeout."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self
from urllib.parse import quote

import httpx

from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.records import (
    AnyWork,
    BareSpeed,
    DistanceWork,
    Judgement,
    NodeStatus,
    Work,
    record_of,
)
from proofserve.remote.transcript import Transcript
from proofserve.reports import NodeError, TooSlowError
from proofserve.rounds.records import StoredResult, Verdict, Winner
from proofserve.rounds.status import EngineGauges
from proofserve.wire import PROOFS, RECEIPTS
from proofserve.wire.records import artifact_record, result_of

# A /generate that waits is answered after everything else that the engine has to do.
TIMEOUT_S = 300.0
CONNECT_S = 5.0
LONGEST_TEXT = 500
# Of vectors: more than any challenge asks for. Bytes.
LONGEST_ANSWER = 64 * 2**20
POLL_S = 0.1
FIRST_RESULT_S = 60.0
# A node waits half a second for its engine's counters, and a busy engine may need longer.
ENGINE_LOOKS = 4
# The log of receipts has one entry a second.
RECEIPT_S = 30.0


class NodeClient:
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
        self.url = url.rstrip("/")
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._transcript = transcript
        self._replayed = replayed
        self._http = httpx.Client(
            base_url=self.url, timeout=timeout, headers=headers, transport=replayed
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.close()

    def models(self) -> list[str]:
        return [model["id"] for model in self._call("GET", "/v1/models")["data"]]

    def chats(self) -> bool:
        """Whether the server has an endpoint for chat: a fleet has none."""
        try:
            response = self._http.get(f"{self.url}/v1/chat/completions")
        except httpx.TransportError as error:
            raise NodeError(f"{self.url}: {error}") from error
        # A server with the endpoint answers 405 to this method.
        return response.status_code != httpx.codes.NOT_FOUND

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

    def status(self) -> NodeStatus:
        """The node's status; the engine's counters in it may be older than the call."""
        return NodeStatus.read(self.describe())

    def describe(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._call("GET", f"{PROOFS}/status")
        return found

    def engine(self) -> EngineGauges:
        return self.status_with_gauges()[1]

    def status_with_gauges(self) -> tuple[NodeStatus, EngineGauges]:
        """With counters of now, or the newest of a few looks. Raises NodeError without any."""
        found = None
        for _ in range(ENGINE_LOOKS):
            status = self.status()
            if status.engine is not None:
                found = status, status.engine
                if status.engine.age_s == 0:
                    break
        if found is None:
            raise NodeError(f"{self.url} shows no engine gauges; is its engine alive?")
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
        answer = self._post("generate", {**work.body, "nonces": list(nonces), "wait": True})
        if failed := answer.get("failed"):
            raise NodeError(f"the node computed no vector for {failed[0]}")
        return [Claim(a["nonce"], a["vector_b64"]) for a in answer["artifacts"]]

    def answer_within(self, work: Work, nonces: Sequence[int], seconds: float) -> bytes:
        """The answer about the vectors of ``nonces`` as it came.

        Raises TooSlowError unless all of it came within ``seconds``, and NodeError.
        """
        body = {**work.body, "nonces": list(nonces), "wait": True}
        return asyncio.run(self._within("POST", f"{PROOFS}/generate", body, seconds))

    def validate(self, work: Work, claims: Sequence[Claim]) -> Verdict:
        """Have the node recompute ``claims`` and judge them by its default test."""
        body = {
            **work.body,
            "nonces": [claim.nonce for claim in claims],
            "wait": True,
            "validation": {"artifacts": [artifact_record(c.nonce, c.vector_b64) for c in claims]},
        }
        return record_of(Verdict, self._post("generate", body))

    def init(self, work: DistanceWork) -> None:
        self._post("init", work.body)

    def phase_generate(self) -> None:
        self._post("phase/generate")

    def phase_validate(self) -> None:
        """Make the configured round validate; what it has generated is stored first."""
        self._post("phase/validate")

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

    def receipts_of(self, response_id: str) -> int:
        """How many receipts the node has of an answer that has ended, once its log has them.

        Raises NodeError, or TooSlowError after ``RECEIPT_S`` seconds.
        """
        deadline = time.monotonic() + RECEIPT_S
        while time.monotonic() < deadline:
            try:
                answer = self._call("GET", f"{RECEIPTS}/{quote(response_id, safe='')}")
                return len(answer["receipts"])
            except NodeError as error:
                if error.status in (httpx.codes.NOT_FOUND, httpx.codes.GONE):
                    return 0
                if error.status != httpx.codes.TOO_EARLY:
                    raise
            time.sleep(POLL_S)
        raise TooSlowError(f"the receipt of {response_id}: not within {RECEIPT_S:g} s")

    def last_seq(self, after: int = 0) -> int:
        while rows := self.results(after):
            after = rows[-1].seq
        return after

    def measure(self, work: AnyWork, forwards: int) -> BareSpeed:
        """Bare forwards back to back, timed inside the engine; needs ``--poc-measure``."""
        body = {
            "block_hash": work.block_hash,
            "public_key": work.public_key,
            **work.measure_fields,
            "batch_size": work.batch_size,
            "forwards": forwards,
        }
        return record_of(BareSpeed, self._post("measure", body))

    async def _within(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float
    ) -> bytes:
        # A blocking client's timeout is for each read: a slow sender could hold it for ever.
        headers, named = self._http.headers, f"{method} {self.url}{path}"
        client = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=None,  # noqa: S113 - below
            transport=self._replayed,
        )
        try:
            async with (
                asyncio.timeout(seconds),
                client,
                client.stream(method, path, json=body) as response,
            ):
                content = b""
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > LONGEST_ANSWER:
                        raise NodeError(f"{named}: more than {LONGEST_ANSWER} bytes")
        except TimeoutError as error:
            raise TooSlowError(f"no answer within {seconds:g} s") from error
        except httpx.RequestError as error:
            # It also cannot be decoded, if its Content-Encoding lies.
            raise NodeError(f"{named}: {str(error) or type(error).__name__}") from error
        if response.is_error:
            text = content.decode(errors="replace")[:LONGEST_TEXT]
            raise NodeError(f"{named}: {response.status_code} {text}", response.status_code)
        if self._transcript is not None:
            self._transcript.hear(response, content)
        return content

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._call("POST", f"{PROOFS}/{path}", body)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise NodeError(f"{method} {self.url}{path}: {reason}") from error
        if response.is_error:
            text = response.text[:LONGEST_TEXT]
            status = response.status_code
            raise NodeError(f"{method} {self.url}{path}: {status} {text}", status)
        if self._transcript is not None:
            self._transcript.hear(response, response.content)
        return response.json()


class BoundedClient(NodeClient):
    """For a node that may cheat: a call ends after ``timeout_s``, and a long answer is refused."""

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            seconds = self._http.timeout.read or TIMEOUT_S
            return json.loads(asyncio.run(self._within(method, path, body, seconds)))
        except TooSlowError as error:
            text = f"{method} {self.url}{path}: {error}"
            raise NodeError(text) from httpx.ReadTimeout(text)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> float:
    """Poll ``condition``; the seconds that took. Raises TooSlowError, which names ``what``."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise TooSlowError(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)
    return time.monotonic() - began


@contextmanager
def computing_round(node: NodeClient, work: AnyWork) -> Iterator[None]:
    """A round that has stored a result when the context begins, and that ends with it."""
    with node.round(work):
        wait_until(lambda: node.status().processed > 0, "first result of a round", FIRST_RESULT_S)
        yield
