"""Chats with receipts as a node makes them, by the reference engine with any weights."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from proofserve.engines.reference.emulation import emulated
from proofserve.engines.reference.forward import logits_of
from proofserve.engines.reference.network import Network
from proofserve.protocol.codec import to_float16
from proofserve.protocol.receipts.record import (
    Receipt,
    Sampling,
    SignedReceipt,
    SigningKey,
    inclusions,
    next_entry,
    token_hash,
)
from proofserve.protocol.receipts.sketches import ReceiptScheme, sketches
from proofserve.verifier.chat.conversation import Conversation, conversation
from proofserve.verifier.validator import CheckpointTokenizer
from proofserve.wire.signed import signed_receipt_body
from support.decoders import decoder_of
from support.provider import CREATED_MS, SEEN_AFTER_MS

KEY = SigningKey.new()
SKETCH_KEY = "2026-01-01-00"

Change = Callable[[Receipt], Receipt]


def unchanged(receipt: Receipt) -> Receipt:
    return receipt


@dataclass(frozen=True)
class Writer:
    """Writes answers with one network, and makes their sketches with another if there is one."""

    writes: Network
    tokenizer: CheckpointTokenizer
    weights_digest: str
    reads: Network | None = None
    k_dim: int = 32
    _decoded: dict[Any, tuple[Network, "Decoded"]] = field(default_factory=dict)
    """What was decoded so far, also by writers that were made of this one."""

    def chat(
        self,
        number: int,
        tokens: int = 64,
        temperature: float = 1.0,
        stated: float | None = None,
        change: Change = unchanged,
    ) -> Conversation:
        """An answer drawn at ``temperature``; request and receipt state ``stated``."""
        said = temperature if stated is None else stated
        request = {**_question(number), "temperature": said, "max_tokens": tokens}
        prompt = self.tokenizer.prompt_ids(request)
        ((output, states),) = self._decode([number], tokens, temperature)
        scheme = ReceiptScheme(SKETCH_KEY, self.weights_digest, self.k_dim)
        rows = scheme.rows(states.shape[1], torch.device("cpu"))
        name = f"chat-{number}"
        receipt = Receipt(
            response_id=name,
            choice=0,
            model="trained",
            adapter=None,
            weights_digest=self.weights_digest,
            sampling=Sampling(temperature=said),
            prompt_tokens=len(prompt),
            prompt_sha256=token_hash(prompt),
            output_tokens=len(output),
            output_sha256=token_hash(output),
            sketch_key=SKETCH_KEY,
            k_dim=self.k_dim,
            sketches=to_float16(sketches(states, rows).numpy()).tobytes(),
            finish_reason="length",
            versions=(("proofserve", "0"),),
            created_ms=CREATED_MS,
        )
        choice = {"index": 0, "message": {"content": None}, "token_ids": list(output)}
        body = signed_receipt_body(signed(change(receipt)))
        response = {"id": name, "choices": [choice]}
        times = (receipt.created_ms, receipt.created_ms + SEEN_AFTER_MS)
        return conversation(name, request, response, [body], *times)

    def chats(
        self, numbers: Iterable[int], tokens: int = 64, temperature: float = 1.0, **how: Any
    ) -> list[Conversation]:
        """As ``chat``. All are decoded in one batch, which takes hardly longer than one answer."""
        self._decode(numbers := [*numbers], tokens, temperature)
        return [self.chat(number, tokens, temperature, **how) for number in numbers]

    def _decode(self, numbers: list[int], tokens: int, temperature: float) -> "list[Decoded]":
        prompts = [self.tokenizer.prompt_ids(_question(number)) for number in numbers]
        asked = [
            Asked(tuple(prompt), tokens, temperature, number)
            for number, prompt in zip(numbers, prompts, strict=True)
        ]
        made = self._once(self.writes, asked)
        if self.reads is None:
            return made
        return self._once(
            self.reads, [replace(each, given=of[0]) for each, of in zip(asked, made, strict=True)]
        )

    def _once(self, network: Network, asked: "list[Asked]") -> "list[Decoded]":
        """As ``decoded``, once for each network and what it is asked."""
        if new := [each for each in asked if (id(network), each) not in self._decoded]:
            for each, made in zip(new, decoded(network, new), strict=True):
                # The network is kept, so that no other one gets its id.
                self._decoded[id(network), each] = (network, made)
        return [self._decoded[id(network), each][1] for each in asked]


def _question(number: int) -> dict[str, Any]:
    """Prompts of all numbers have as many tokens, so that one batch can answer them."""
    text = " ".join(f"word{digit}" for digit in f"{number * 7919:012}")
    return {"messages": [{"role": "user", "content": text}]}


def signed(receipt: Receipt) -> SignedReceipt:
    """With a place in a log of its own, a second later."""
    entry = next_entry(None, [receipt.digest], receipt.created_ms + 1000)
    made = SignedReceipt(receipt, KEY.public_key, KEY.sign(receipt.digest))
    found = inclusions(entry, [receipt.digest])[0]
    return replace(made, inclusion=found, entry_signature=KEY.sign(entry.hash))


# An answer's tokens, and the states that chose them.
Decoded = tuple[tuple[int, ...], Tensor]


@dataclass(frozen=True)
class Asked:
    """Of an answer: its prompt, how it is drawn, or the tokens that it has."""

    prompt: tuple[int, ...]
    tokens: int
    temperature: float
    seed: int
    given: tuple[int, ...] | None = None


@torch.inference_mode()
def decoded(network: Network, asked: Sequence[Asked]) -> list[Decoded]:
    """Answers token by token, as servers make them: of prompts of one length, as many tokens."""
    draws = [torch.Generator().manual_seed(each.seed) for each in asked]
    decoder = decoder_of(network)
    cache, read = DynamicCache(), torch.tensor([each.prompt for each in asked])
    outputs: list[list[int]] = []
    states = []
    for place in range(asked[0].tokens):
        with emulated(decoder, network.kernels, is_layer=False):
            made = decoder(input_ids=read, past_key_values=cache, use_cache=True)
        state = made.last_hidden_state[:, -1]
        states.append(state.float())
        given = [each.given[place] for each in asked if each.given is not None]
        outputs.append(given or _drawn(logits_of(network, state), asked, draws))
        read = torch.tensor(outputs[-1])[:, None]
    answers = zip(*outputs, strict=True)
    return [*zip(answers, torch.stack(states, 1), strict=True)]


def _drawn(logits: Tensor, asked: Sequence[Asked], draws: Sequence[torch.Generator]) -> list[int]:
    tokens = []
    for row, each, draw in zip(logits, asked, draws, strict=True):
        if each.temperature == 0.0:
            tokens.append(int(row.argmax()))
        else:
            chances = torch.softmax(row / each.temperature, -1)
            tokens.append(int(torch.multinomial(chances, 1, generator=draw)))
    return tokens
