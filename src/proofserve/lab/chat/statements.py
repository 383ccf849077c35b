"""What a receipt states, against the chat that its client had; no model is run here.

The checks, in their order: ``signature``, ``log``, ``prompt``, ``answer`` and ``sampling``. One
that fails convicts: the node signed what it did not do, or the receipt is none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proofserve.lab.chat.answers import Answer
from proofserve.lab.chat.chat_tokens import (
    ChatTokenizer,
    FailedCheck,
    StatementError,
    output_ids,
    prompt_ids,
)
from proofserve.lab.chat.conversation import ChatChoice, Conversation
from proofserve.lab.chat.public_log import PublicLog
from proofserve.lab.client.errors import LabError
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.log import require_inclusion
from proofserve.protocol.receipts.record import Receipt, Sampling
from proofserve.protocol.receipts.signature import SignedReceipt, require_signatures
from proofserve.protocol.receipts.sketches import ReceiptScheme

# Fields of a request that change or exclude tokens otherwise than ``Sampling`` says.
RESTRICTING = frozenset(
    {"response_format", "structured_outputs", "logit_bias", "bad_words", "allowed_token_ids"}
    | {"min_tokens", "tools", "stop_token_ids", "thinking_token_budget"}
)
# vLLM raises a temperature above 0 to this one.
LEAST_TEMPERATURE = 0.01


@dataclass(frozen=True, slots=True)
class Readable:
    """What a checkpoint can read: ids below ``vocabulary``, ``longest`` tokens in one forward."""

    vocabulary: int
    longest: int

    def require(self, answer: Answer) -> None:
        """Raise StatementError if the model cannot have chosen the tokens of ``answer``.

        Raises LabError if it cannot be recomputed otherwise.
        """
        tokens = len(answer.prompt) + len(answer.output) - 1
        if not answer.prompt or not answer.output:
            raise LabError(f"{answer.name}: the prompt or the answer has no tokens")
        if (most := max(answer.prompt)) >= self.vocabulary:
            raise LabError(f"{answer.name}: prompt: the model has no token {most}")
        if (most := max(answer.output)) >= self.vocabulary:
            raise StatementError("answer", f"{answer.name}: the model has no token {most}")
        if tokens > self.longest:
            raise LabError(f"{answer.name}: {tokens} tokens exceed the model's {self.longest}")


@dataclass(frozen=True, slots=True)
class Known:
    """What a validator knows of the node; None where it knows nothing.

    ``weights_digest`` is that of its own checkpoint, in hexadecimal. ``log`` is a failure if the
    log as a whole does not hold. ``readable`` is what the own checkpoint can read.
    """

    weights_digest: str
    public_key: bytes | None = None
    log: PublicLog | FailedCheck | None = None
    readable: Readable | None = None


@dataclass(frozen=True, slots=True)
class CheckedChat:
    """``answers`` are those whose receipts state what the client saw.

    ``failures`` convict. ``unknown`` says of each receipt that cannot be checked why: it is of
    another checkpoint or has a LoRA adapter, or the prompt's or answer's tokens are not certain.
    """

    answers: tuple[Answer, ...]
    failures: tuple[FailedCheck, ...]
    unknown: tuple[str, ...]


def checked_answers(chat: Conversation, tokenizer: ChatTokenizer, known: Known) -> CheckedChat:
    """What the receipts of ``chat`` are worth, each by itself."""
    answers: list[Answer] = []
    failures: list[FailedCheck] = []
    unknown: list[str] = []
    for signed in chat.receipts:
        try:
            answers.append(_checked(chat, signed, tokenizer, known))
        except StatementError as error:
            failures.append(error.failure)
        except LabError as error:
            unknown.append(str(error))
    return CheckedChat(tuple(answers), tuple(failures), tuple(unknown))


def _checked(
    chat: Conversation, signed: SignedReceipt, tokenizer: ChatTokenizer, known: Known
) -> Answer:
    receipt = signed.receipt
    name = f"{chat.name} choice {receipt.choice}"
    _signed_by_the_node(signed, known)
    _logged_in_time(signed, known)
    if receipt.weights_digest != known.weights_digest:
        theirs, ours = receipt.weights_digest, known.weights_digest
        raise LabError(f"{name}: weights_digest: the receipt has {theirs}, the checkpoint {ours}")
    if receipt.adapter is not None:
        merged = "give a checkpoint with the adapter merged into its weights"
        raise LabError(f"{name}: adapter: {receipt.adapter} cannot be checked; {merged}")
    choice = _choice(chat, receipt)
    prompt = prompt_ids(name, chat.request, receipt, tokenizer)
    output = output_ids(name, chat.request, choice, receipt, tokenizer)
    _sampled_as_asked(name, chat.request, receipt.sampling)
    scheme = ReceiptScheme(receipt.sketch_key, receipt.weights_digest, receipt.k_dim)
    answer = Answer(name, prompt, output, receipt.sampling, scheme, receipt.vectors)
    if known.readable is not None:
        known.readable.require(answer)
    return answer


def _signed_by_the_node(signed: SignedReceipt, known: Known) -> None:
    if known.public_key not in {None, signed.public_key}:
        raise StatementError("signature", "it is by another key than the node's")
    if isinstance(known.log, PublicLog) and known.log.public_key != signed.public_key:
        raise StatementError("signature", "it is by another key than the log's")
    try:
        require_signatures(signed)
    except ProtocolError as error:
        raise StatementError("signature", str(error)) from error


def _logged_in_time(signed: SignedReceipt, known: Known) -> None:
    if isinstance(known.log, FailedCheck):
        raise StatementError(known.log.check, known.log.text)
    if signed.inclusion is None:
        raise StatementError("log", "the receipt is not in the log")
    try:
        require_inclusion(signed.receipt.digest, signed.receipt.created_ms, signed.inclusion)
        if known.log is not None:
            known.log.require(signed.inclusion.entry)
    except ProtocolError as error:
        raise StatementError("log", str(error)) from error


def _choice(chat: Conversation, receipt: Receipt) -> ChatChoice:
    if receipt.response_id != chat.response_id:
        text = f"the receipt is of response {receipt.response_id}, the answer of {chat.response_id}"
        raise StatementError("answer", text)
    for choice in chat.choices:
        if choice.index == receipt.choice:
            return choice
    raise StatementError("answer", f"the response has no choice {receipt.choice}")


def _sampled_as_asked(name: str, request: Mapping[str, Any], stated: Sampling) -> None:
    if stated.restricted and not any(request.get(field) for field in RESTRICTING):
        text = "the receipt says that the request restricted the tokens, which it did not"
        raise StatementError("sampling", text)
    for field in Sampling.__dataclass_fields__:
        asked, used = request.get(field), getattr(stated, field)
        if field == "restricted" or asked is None:
            continue
        try:
            number = float(asked)
        except (TypeError, ValueError) as error:
            raise LabError(f"{name}: request.{field}: {asked!r} is no number") from error
        if not _same(field, number, float(used), stated):
            raise StatementError(
                "sampling", f"{field}: the request has {asked}, the receipt {used}"
            )


def _same(field: str, asked: float, used: float, stated: Sampling) -> bool:
    if field == "temperature" and 0.0 < asked < LEAST_TEMPERATURE:
        return used in {asked, LEAST_TEMPERATURE}
    if field in {"top_p", "top_k", "min_p"} and stated.temperature == 0.0:
        # The server ignores them in a greedy answer.
        return True
    if field == "top_k" and asked < 0.0:
        return used == 0.0
    return asked == used
