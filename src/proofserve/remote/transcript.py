"""What a node answered, with its signatures, and a node that answers so again."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.signature import PUBLIC_KEY_BYTES
from proofserve.wire.signed import ANSWER_HEADER, SignedAnswer, answer_with


@dataclass(slots=True)
class Transcript:
    """The successful answers of one node in their order; ``unsigned`` has what it did not sign."""

    signed: list[SignedAnswer] = field(default_factory=list)
    unsigned: list[SignedAnswer] = field(default_factory=list)

    def forget(self) -> None:
        self.signed.clear()
        self.unsigned.clear()

    def hear(self, response: httpx.Response, body: bytes) -> None:
        """Keep the whole ``body`` of a successful ``response``."""
        asked = response.request
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
