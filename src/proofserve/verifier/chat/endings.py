"""How and when an answer ended, beside its receipt. An honest node may fail here, now and then."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from proofserve.protocol.receipts.signature import SignedReceipt
from proofserve.reports import ReportedError
from proofserve.verifier.chat.conversation import ChatChoice, Conversation
from proofserve.verifier.chat.public_log import PublicLog

if TYPE_CHECKING:
    from proofserve.verifier.validator import CheckpointTokenizer

# The completions API's own limit of tokens.
COMPLETION_TOKENS = 16
# What servers say of an answer that ended in a call of a tool.
CALLED = frozenset({"tool_calls", "function_call"})


def why_late(
    chat: Conversation, signed: SignedReceipt, log: PublicLog | None, late_ms: int
) -> str | None:
    """Unless the client's side saw the receipt, or a root over it, within ``late_ms`` of the end.

    By its own clocks: the node's may be wrong, or lie. Raises ReportedError if they were not read.
    """
    entry = signed.inclusion.entry if signed.inclusion else None
    times = (chat.seen_ms, log.seen_ms.get(entry.index) if log and entry else None)
    seen = min((each for each in times if each is not None), default=None)
    at = seen if seen is not None or entry is None else entry.time_ms
    if chat.ended_ms is not None and at is not None and at > chat.ended_ms + late_ms:
        after = (at - chat.ended_ms) / 1e3
        which = "was there" if seen is not None else "entered the log"
        return f"its receipt {which} {after:g} s after its end, not within {late_ms / 1e3:g} s"
    if chat.ended_ms is None or seen is None:
        text = '"ended_ms" of the answer and "seen_ms" of its receipt'
        raise ReportedError(f"the client did not note by its own clock {text}")
    return None


def why_cut(
    request: Mapping[str, Any],
    choice: ChatChoice,
    reason: str,
    output: tuple[int, ...],
    room: int | None,
    tokenizer: "CheckpointTokenizer",
) -> str | None:
    """Unless the model or the request ended the answer as the receipt's ``reason`` says.

    A server may have a limit of its own; ``room`` is what the model leaves for an answer.
    """
    limit = _limit(request)
    if choice.finish_reason not in {None, reason, *CALLED}:
        return f"the receipt says that it ended by {reason}, the answer {choice.finish_reason}"
    if limit is not None and len(output) > limit:
        return f"it has {len(output)} tokens, of which the request asked for {limit} at most"
    if reason == "stop":
        stopped = _stopped(request, output, tokenizer)
        return None if stopped else "it stopped before a token or a text that ends an answer"
    if reason != "length":
        return f"it ended by {reason}"
    full = limit is None if room is None else len(output) >= room
    return None if full or len(output) == limit else f"it ends at {len(output)} of {limit} tokens"


def _limit(request: Mapping[str, Any]) -> int | None:
    """The most tokens that the request asked for; None for as many as there is room for."""
    for field in ("max_completion_tokens", "max_tokens"):
        if isinstance(asked := request.get(field), int):
            return asked
    return None if "messages" in request else COMPLETION_TOKENS


def _stopped(
    request: Mapping[str, Any], output: tuple[int, ...], tokenizer: "CheckpointTokenizer"
) -> bool:
    ends: Sequence[int] = (*tokenizer.end_ids, *(request.get("stop_token_ids") or ()))
    stop = request.get("stop") or ()
    texts = [stop] if isinstance(stop, str) else stop
    # Formats that answer in parts have marks of their own, which servers stop at.
    known = bool(ends) and not tokenizer.has_channels
    whole = tokenizer.text(output)
    return not known or output[-1] in ends or any(str(each) in whole for each in texts)
