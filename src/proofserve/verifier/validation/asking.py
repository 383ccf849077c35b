"""The nodes that are validated: all are asked at the same time, and what they say is kept."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import Self

from pydantic import BaseModel, ConfigDict

from proofserve.remote.node_client import (
    BoundedClient,
    NodeClient,
    Transcript,
    Unproved,
    UnprovedError,
    replaying,
)
from proofserve.verifier.bundle import AnswerRecord, HeardNode, UnsignedError
from proofserve.verifier.challenge import (
    DESCRIBES_ITSELF_S,
    ChallengeAnswer,
    FreshChallenge,
    answer,
)
from proofserve.verifier.validation.ledger import OpenChallenge
from proofserve.verifier.validation.passes import fill


@dataclass(frozen=True, slots=True)
class ValidatedNode:
    """A node by its ``name``. If ``public_key`` (hexadecimal) is known, it has to sign with it."""

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)
    public_key: str | None = None


class KeptAnswers(BaseModel):
    """What a node answered to a challenge; ``signed_by`` is the one key of all answers, if any."""

    model_config = ConfigDict(extra="forbid")

    signed_by: str | None
    answers: list[AnswerRecord]

    @classmethod
    def of(cls, heard: HeardNode) -> Self:
        """Raises UnsignedError for an answer that is no text."""
        try:
            signed_by = heard.public_key().hex()
        except UnsignedError:
            signed_by = None
        every = (*heard.transcript.unsigned, *heard.transcript.signed)
        return cls(signed_by=signed_by, answers=[AnswerRecord.of(each) for each in every])

    def read(self, asked: OpenChallenge) -> tuple[HeardNode, ChallengeAnswer]:
        """As when it came: what is judged is what was kept, whenever that is."""
        key = bytes.fromhex(self.signed_by) if self.signed_by else bytes(32)
        every = [each.answer(key) for each in self.answers]
        heard = Transcript()
        for each in every:
            (heard.signed if each.is_signed else heard.unsigned).append(each)
        with NodeClient(asked.url, replayed=replaying(every)) as node:
            found = answer(node, asked.challenge, math.inf)
        return HeardNode(asked.url, heard, asked.challenge), found


def ask(node: ValidatedNode, asked: FreshChallenge, deadline_s: float) -> tuple[KeptAnswers, float]:
    """What ``node`` says of itself and answers, and the seconds of the latter.

    Raises UnprovedError as ``challenge.answer``, and for an answer with another key's signature.
    """
    heard = Transcript()
    with BoundedClient(node.url, node.api_key, DESCRIBES_ITSELF_S, heard) as client:
        seconds = answer(client, asked, deadline_s).seconds
    try:
        kept = KeptAnswers.of(HeardNode(node.url, heard, asked))
    except UnsignedError as error:
        raise UnprovedError(Unproved.UNREADABLE, str(error), seconds) from error
    if node.public_key not in {None, kept.signed_by}:
        text = f"public_key: {node.public_key} is expected, signed is by {kept.signed_by or 'none'}"
        raise UnprovedError(Unproved.OTHER_KEY, text, seconds)
    return kept, seconds


def ask_all(
    asked: Sequence[tuple[ValidatedNode, OpenChallenge]], deadline_s: float
) -> Iterator[tuple[OpenChallenge, Future[tuple[KeptAnswers, float]]]]:
    """All at the same time: who owns several nodes must compute for all of them at once."""
    calls: dict[Future[tuple[KeptAnswers, float]], OpenChallenge] = {}
    for node, of in asked:
        call: Future[tuple[KeptAnswers, float]] = Future()
        calls[call] = of
        work = partial(ask, node, of.challenge, deadline_s)
        # A daemon: after a signal the command ends, and waits for no node.
        Thread(target=fill, args=(call, work), name=f"ask {node.name}", daemon=True).start()
    for call in as_completed(calls):
        yield calls[call], call
