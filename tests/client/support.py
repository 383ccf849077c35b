"""An application that chats with the official client, and the chats that were kept of it."""

from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from proofserve.remote.recorder import Recorder
from proofserve.verifier.chat.conversation import Conversation, read
from proofserve.verifier.chat.statements import NodeFacts, checked_answers
from support.provider import TOKENIZER, WEIGHTS

ASK: dict[str, Any] = {
    "model": "toy",
    "messages": [{"role": "user", "content": "x"}],
    "temperature": 0.5,
}


def client_of(recorder: Recorder, url: str, **options: Any) -> OpenAI:
    return OpenAI(
        base_url=f"{url}/v1",
        api_key="secret",
        max_retries=0,
        http_client=recorder.http_client(),
        **options,
    )


def kept(folder: Path) -> list[Conversation]:
    assert [path for path in folder.iterdir() if path.suffix != ".json"] == []
    return [read(path) for path in sorted(folder.iterdir())]


def honest(chat: Conversation) -> int:
    """The number of its answers, all of which fit their receipts."""
    found = checked_answers([chat], TOKENIZER, NodeFacts(WEIGHTS))
    assert (found.failures, found.gaps) == ((), ())
    return len(found.answers)


def raw_answer(http: httpx.Client, url: str, **body: Any) -> bytes:
    sent = http.post(f"{url}/v1/chat/completions", json={**ASK, **body})
    return sent.content
