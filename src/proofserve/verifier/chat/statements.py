"""What a receipt states, against the chat that its client had; no model is run here.

The checks, in their order: ``signature``, ``log``, ``prompt``, ``answer`` and ``sampling``. One
that fails convicts: the node signed what it did not do, or the receipt is none. What honest nodes
may do too, now and then, is a gap: it is counted by its name, and too much of it clears no node.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import (
    LogEntry,
    Sampling,
    SignedReceipt,
    require_inclusion,
    require_signatures,
    token_hash,
)
from proofserve.protocol.receipts.sketches import ReceiptScheme
from proofserve.reports import ReportedError
from proofserve.verifier.chat.answers import Answer
from proofserve.verifier.chat.conversation import ChatChoice, Conversation, PublicLog

if TYPE_CHECKING:
    from proofserve.verifier.validator import CheckpointTokenizer

# Of all answers, with a gap: beyond it no node is cleared.
MOST_GAPS = 0.05


@dataclass
class FailedCheck(Exception):
    """A statement of a receipt does not hold; ``text`` says what does not fit, for a reader."""

    check: str
    text: str


class GapKind(StrEnum):
    """Why an answer shows nothing."""

    MISSING = "missing"
    # The client's side did not see the receipt, or a root over it, soon after the answer.
    LATE = "late"
    # It ends where neither the model nor the request ended it.
    CUT = "cut"
    # The receipt is of an adapter or of weights that the client did not ask for.
    OTHER = "other weights"
    UNCHECKED = "not checked"


@dataclass
class Gap(Exception):
    """An answer that shows nothing, or its receipt; ``text`` says why, for a reader."""

    kind: GapKind
    text: str


def leave_open(gaps: Mapping[GapKind, int], choices: int, most: float) -> str:
    """Why the ``gaps`` of so many ``choices`` keep a node from being cleared; empty if not."""
    named = ", ".join(f"{count} {kind}" for kind, count in sorted(gaps.items()) if count)
    if gaps.get(GapKind.OTHER):
        return f"{named}, of {choices} answers: receipts are of weights that were not asked for"
    share = sum(gaps.values()) / max(1, choices)
    return f"{named}, of {choices} answers: {share:.0%}, more than {most:.0%}" * (share > most)


# Fields by which a prompt has other tokens, in ways that depend on the server.
PROMPT_SHAPING = frozenset(
    {"tools", "documents", "reasoning_effort", "truncate_prompt_tokens", "add_special_tokens"}
)
PLAIN_MESSAGE = frozenset({"role", "content", "name"})
# Fields by which a server shows another text than that of the answer's tokens.
TEXT_SHAPING = frozenset(
    {"echo", "skip_special_tokens", "spaces_between_special_tokens", "include_reasoning", "tools"}
)
UNFINISHED = "\ufffd"
# What stands before reasoning that a server put apart, and between it and the text: of harmony,
# whose other marks are special tokens, and of templates with tags, which may be in the prompt.
REASONING_FORMATS = (("analysis", "assistantfinal"), ("<think>", "</think>"), ("", "</think>"))
# Fields of a request that change or exclude tokens otherwise than ``Sampling`` says.
RESTRICTING = frozenset(
    {"response_format", "structured_outputs", "logit_bias", "bad_words", "allowed_token_ids"}
    | {"min_tokens", "tools", "stop_token_ids", "thinking_token_budget"}
)
# vLLM raises a temperature above 0 to this one.
LEAST_TEMPERATURE = 0.01
# After an answer's end, by the client's own clock.
LATE_MS = 60_000


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a validator knows of the node; None where it knows nothing.

    ``weights_digest`` is that of its own checkpoint, in hexadecimal. ``log`` is a failure if the
    log as a whole does not hold. ``vocabulary`` and ``longest`` are the ids and the tokens that
    this checkpoint can read. A receipt is late after ``late_ms``.
    """

    weights_digest: str
    public_key: bytes | None = None
    log: PublicLog | FailedCheck | None = None
    vocabulary: int | None = None
    longest: int | None = None
    late_ms: int = LATE_MS


@dataclass(frozen=True, slots=True)
class CheckedChats:
    """``answers`` are those whose receipts state what the client saw, of ``choices`` in all.

    ``failures`` convict. ``gaps`` are all others, one each.
    """

    answers: tuple[Answer, ...]
    failures: tuple[FailedCheck, ...]
    gaps: tuple[Gap, ...]
    choices: int


def checked_answers(
    chats: Sequence[Conversation], tokenizer: "CheckpointTokenizer", known: NodeFacts
) -> CheckedChats:
    """What the receipts of ``chats`` are worth, each by itself."""
    answers: list[Answer] = []
    failures: list[FailedCheck] = []
    gaps: list[Gap] = []
    for chat in chats:
        no_receipt = Gap(GapKind.MISSING, f"{chat.name}: no receipt")
        gaps += [no_receipt] * chat.without_receipt
    for chat, signed in [(each, signed) for each in chats for signed in each.receipts]:
        try:
            answers.append(Statement(chat, signed, tokenizer, known).checked())
        except FailedCheck as failure:
            failures.append(failure)
        except Gap as gap:
            gaps.append(gap)
        except ReportedError as error:
            gaps.append(Gap(GapKind.UNCHECKED, str(error)))
    choices = sum(len(chat.choices) for chat in chats)
    return CheckedChats(tuple(answers), tuple(failures), tuple(gaps), choices)


@dataclass(frozen=True, slots=True)
class Statement:
    """A receipt beside the chat that its client had.

    The methods raise FailedCheck if what it states does not hold, Gap if it says nothing, and
    ReportedError if that cannot be told: servers may honestly read or show such a chat otherwise.
    """

    chat: Conversation
    signed: SignedReceipt
    tokenizer: "CheckpointTokenizer"
    known: NodeFacts

    @property
    def name(self) -> str:
        return f"{self.chat.name} choice {self.signed.receipt.choice}"

    def checked(self) -> Answer:
        receipt = self.signed.receipt
        self._signed_by_the_node()
        entry = self._entry()
        self._of_the_weights()
        choice = self._choice()
        prompt, output = self._prompt_ids(), self.output_ids(choice)
        self._sampled_as_asked()
        self._require_readable(prompt, output)
        if cut := self._cut(choice, prompt, output):
            raise self._gap(GapKind.CUT, cut)
        self._seen_in_time(entry)
        scheme = ReceiptScheme(receipt.sketch_key, receipt.weights_digest, receipt.k_dim)
        return Answer(self.name, prompt, output, receipt.sampling, scheme, receipt.vectors)

    def _unsure(self, text: str) -> ReportedError:
        return ReportedError(f"{self.name}: {text}")

    def _signed_by_the_node(self) -> None:
        signed, log = self.signed, self.known.log
        if self.known.public_key not in {None, signed.public_key}:
            raise FailedCheck("signature", "it is by another key than the node's")
        if isinstance(log, PublicLog) and log.public_key != signed.public_key:
            raise FailedCheck("signature", "it is by another key than the log's")
        try:
            require_signatures(signed)
        except ProtocolError as error:
            raise FailedCheck("signature", str(error)) from error

    def _entry(self) -> LogEntry:
        """Of the log, which has the receipt."""
        receipt, inclusion, log = self.signed.receipt, self.signed.inclusion, self.known.log
        if isinstance(log, FailedCheck):
            raise log
        if inclusion is None:
            raise FailedCheck("log", "the receipt is not in the log")
        try:
            require_inclusion(receipt.digest, inclusion)
            if log is not None:
                log.require(inclusion.entry)
        except ProtocolError as error:
            raise FailedCheck("log", str(error)) from error
        return inclusion.entry

    def _of_the_weights(self) -> None:
        receipt, ours = self.signed.receipt, self.known.weights_digest
        if receipt.weights_digest != ours:
            theirs = receipt.weights_digest
            text = f"weights_digest: the receipt has {theirs}, the checkpoint {ours}"
            raise self._gap(GapKind.OTHER, text)
        if receipt.adapter is None:
            return
        if receipt.adapter != self.chat.request.get("model"):
            text = f"adapter: the receipt has {receipt.adapter}, which the request did not name"
            raise self._gap(GapKind.OTHER, text)
        merged = "give a checkpoint with the adapter merged into its weights"
        raise self._unsure(f"adapter: {receipt.adapter} cannot be checked; {merged}")

    def _seen_in_time(self, entry: LogEntry) -> None:
        """The client's side saw the receipt, or the ``entry`` over it, soon after the end.

        By its own clocks: the node's may be wrong, or lie.
        """
        chat, log, late_ms = self.chat, self.known.log, self.known.late_ms
        times = (chat.seen_ms, log.seen_ms.get(entry.index) if isinstance(log, PublicLog) else None)
        seen = min((each for each in times if each is not None), default=None)
        at = entry.time_ms if seen is None else seen
        if chat.ended_ms is not None and at > chat.ended_ms + late_ms:
            after, within = (at - chat.ended_ms) / 1e3, late_ms / 1e3
            which = "entered the log" if seen is None else "was there"
            text = f"its receipt {which} {after:g} s after its end, not within {within:g} s"
            raise self._gap(GapKind.LATE, text)
        if chat.ended_ms is None or seen is None:
            text = '"ended_ms" of the answer and "seen_ms" of its receipt'
            raise self._unsure(f"the client did not note by its own clock {text}")

    def _gap(self, kind: GapKind, text: str) -> Gap:
        return Gap(kind, f"{self.name}: {text}")

    def _choice(self) -> ChatChoice:
        receipt, chat = self.signed.receipt, self.chat
        if receipt.response_id != chat.response_id:
            theirs = f"the receipt is of response {receipt.response_id}"
            raise FailedCheck("answer", f"{theirs}, the answer of {chat.response_id}")
        for choice in chat.choices:
            if choice.index == receipt.choice:
                return choice
        raise FailedCheck("answer", f"the response has no choice {receipt.choice}")

    def _require_readable(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """The model can have chosen ``output``, and reads both."""
        vocabulary, longest = self.known.vocabulary, self.known.longest
        tokens = len(prompt) + len(output) - 1
        if not prompt or not output:
            raise self._unsure("the prompt or the answer has no tokens")
        if vocabulary is None or longest is None:
            return
        if (most := max(prompt)) >= vocabulary:
            raise self._unsure(f"prompt: the model has no token {most}")
        if (most := max(output)) >= vocabulary:
            raise FailedCheck("answer", f"{self.name}: the model has no token {most}")
        if tokens > longest:
            raise self._unsure(f"{tokens} tokens exceed the model's {longest}")

    def _sampled_as_asked(self) -> None:
        request, stated = self.chat.request, self.signed.receipt.sampling
        if stated.restricted and not any(request.get(field) for field in RESTRICTING):
            text = "the receipt says that the request restricted the tokens, which it did not"
            raise FailedCheck("sampling", text)
        for field in Sampling.__dataclass_fields__:
            asked, used = request.get(field), getattr(stated, field)
            if field == "restricted" or asked is None:
                continue
            try:
                number = float(asked)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not math.isfinite(number):
                raise self._unsure(f"request.{field}: {asked!r} is no number")
            if not _same(field, number, float(used), stated):
                text = f"{field}: the request has {asked}, the receipt {used}"
                raise FailedCheck("sampling", text)

    def _prompt_ids(self) -> tuple[int, ...]:
        """The ids of the request's prompt, which the node read."""
        receipt, ids = self.signed.receipt, self.tokenizer.prompt_ids(self.chat.request)
        try:
            same = len(ids) == receipt.prompt_tokens and token_hash(ids) == receipt.prompt_sha256
        except OverflowError as error:
            raise ReportedError("request.prompt: its token ids are not 0..2**32-1") from error
        if same:
            return ids
        read = f"the node read {receipt.prompt_tokens} tokens"
        text = f"{read}, which are not the {len(ids)} of this request by the checkpoint's template"
        if _is_plain(self.chat.request) and not self.tokenizer.tells_time:
            raise FailedCheck("prompt", text)
        raise self._unsure(f"prompt: {text}; servers may read such a request in several ways")

    def output_ids(self, choice: ChatChoice) -> tuple[int, ...]:
        """The ids of the answer that the client saw, which the receipt is of."""
        receipt, ids = self.signed.receipt, choice.token_ids
        if ids is None:
            return self._spelt(choice.text or "")
        if len(ids) != receipt.output_tokens:
            text = f"the receipt has {receipt.output_tokens} tokens, the answer {len(ids)}"
            raise FailedCheck("answer", text)
        if token_hash(ids) != receipt.output_sha256:
            raise FailedCheck("answer", "the receipt is of other tokens")
        self._require_shown(choice, ids)
        return ids

    def _cut(self, choice: ChatChoice, prompt: Sequence[int], output: tuple[int, ...]) -> str:
        """Empty if the model or the request ended the answer as the receipt says.

        A server may have a limit of its own, beside what the model leaves for an answer.
        """
        limit, count = _limit(self.chat.request), len(output)
        reason, longest = self.signed.receipt.finish_reason, self.known.longest
        if choice.finish_reason not in {None, reason, *CALLED}:
            return f"the receipt says that it ended by {reason}, the answer {choice.finish_reason}"
        if limit is not None and count > limit:
            return f"it has {count} tokens, of which the request asked for {limit} at most"
        if reason == "stop":
            before = "it stopped before a token or a text that ends an answer"
            return "" if self._stopped(output) else before
        if reason != "length":
            return f"it ended by {reason}"
        full = limit is None if longest is None else count >= longest - len(prompt)
        return "" if full or count == limit else f"it ends at {count} of {limit} tokens"

    def _stopped(self, output: tuple[int, ...]) -> bool:
        request, tokenizer = self.chat.request, self.tokenizer
        ends = (*tokenizer.end_ids, *(request.get("stop_token_ids") or ()))
        stop = request.get("stop") or ()
        texts = [stop] if isinstance(stop, str) else stop
        # Formats that answer in parts have marks of their own, which servers stop at.
        known = bool(ends) and not tokenizer.has_channels
        whole = tokenizer.text(output)
        return not known or output[-1] in ends or any(str(each) in whole for each in texts)

    def _require_shown(self, choice: ChatChoice, ids: tuple[int, ...]) -> None:
        """The client read the text of its tokens, or what a server may honestly make of it."""
        if choice.text is None:
            return
        request, text_of = self.chat.request, self.tokenizer.text
        shown, whole = _trimmed(choice.text), _trimmed(text_of(ids))
        # The token that ends an answer does not show.
        if shown in {whole, _trimmed(text_of(ids[:-1]))}:
            return
        if choice.reasoning and _follows(shown, choice.reasoning, whole):
            return
        begins = bool(shown) and whole.startswith(shown)
        if begins and request.get("stop"):
            return
        in_parts = choice.split or self.tokenizer.has_channels
        certain = not (in_parts or _has_any(request, TEXT_SHAPING) or UNFINISHED in whole)
        if certain and begins:
            raise FailedCheck("answer", "the text of the answer is cut: its tokens say more")
        if certain and shown not in whole:
            raise FailedCheck("answer", "the text of the answer is not that of its tokens")
        raise self._unsure("the answer's text is not the whole text of its tokens")

    def _spelt(self, text: str) -> tuple[int, ...]:
        """The ids of an answer that the client has as text alone."""
        receipt, ids = self.signed.receipt, self.tokenizer.answer_ids(text)
        # A token that ends an answer does not show in its text.
        for candidate in (ids, *((*ids, end) for end in self.tokenizer.end_ids)):
            if len(candidate) == receipt.output_tokens and (
                token_hash(candidate) == receipt.output_sha256
            ):
                return candidate
        # The same text has several spellings in tokens, shorter ones too, so this proves nothing.
        hint = 'ask with "return_token_ids": true'
        raise self._unsure(f"the answer's token ids cannot be told from its text; {hint}")


def _same(field: str, asked: float, used: float, stated: Sampling) -> bool:
    if field == "temperature" and 0.0 < asked < LEAST_TEMPERATURE:
        return used in {asked, LEAST_TEMPERATURE}
    if field in {"top_p", "top_k", "min_p"} and stated.temperature == 0.0:
        # The server ignores them in a greedy answer.
        return True
    if field == "top_k" and asked < 0.0:
        return used == 0.0
    return asked == used


def _is_plain(request: Mapping[str, Any]) -> bool:
    """Whether every server makes the same prompt of ``request``."""
    messages = request.get("messages") or ()
    return not _has_any(request, PROMPT_SHAPING) and all(
        isinstance(each, Mapping)
        and PLAIN_MESSAGE.issuperset(each)
        and isinstance(each.get("content"), str)
        for each in messages
    )


def _follows(shown: str, reasoning: str, whole: str) -> bool:
    """Whether ``whole`` is reasoning and then the text, in one of the known formats."""
    return bool(shown) and "".join(whole.split()) in {
        "".join(f"{before}{reasoning}{between}{shown}".split())
        for before, between in REASONING_FORMATS
    }


def _trimmed(text: str) -> str:
    """Servers and tokenizers differ in spaces at both ends, and in an unfinished last character."""
    return text.rstrip(UNFINISHED).strip()


def _has_any(request: Mapping[str, Any], fields: frozenset[str]) -> bool:
    return any(request.get(field) not in (None, [], {}) for field in fields)


# How and when answers end: an honest node may fail there, now and then.
# The completions API's own limit of tokens.
COMPLETION_TOKENS = 16
# What servers say of an answer that ended in a call of a tool.
CALLED = frozenset({"tool_calls", "function_call"})


def _limit(request: Mapping[str, Any]) -> int | None:
    """The most tokens that the request asked for; None for as many as there is room for."""
    for field in ("max_completion_tokens", "max_tokens"):
        if isinstance(asked := request.get(field), int):
            return asked
    return None if "messages" in request else COMPLETION_TOKENS
