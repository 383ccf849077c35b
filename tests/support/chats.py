"""Chats with receipts as a node makes them, by the reference engine with any weights."""

from collections.abc import Callable, Sequence
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
    first_entry,
    inclusions,
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
        text = " ".join(f"word{(number * 7 + i) % 90}" for i in range(12))
        request: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        request |= {"temperature": said, "max_tokens": tokens}
        prompt = self.tokenizer.prompt_ids(request)
        output, states = self._decode(self.writes, prompt, tokens, temperature, number)
        if self.reads is not None:
            _, states = self._decode(self.reads, prompt, tokens, 0.0, number, output)
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

    def _decode(self, network: Network, *asked: Any) -> "Decoded":
        """As ``decoded``, once for each network and what it is asked."""
        key = (id(network), *map(str, asked))
        if key not in self._decoded:
            # The network is kept, so that no other one gets its id.
            self._decoded[key] = (network, decoded(network, *asked))
        return self._decoded[key][1]


def signed(receipt: Receipt) -> SignedReceipt:
    """With a place in a log of its own, a second later."""
    entry = first_entry([receipt.digest], receipt.created_ms + 1000)
    made = SignedReceipt(receipt, KEY.public_key, KEY.sign(receipt.digest))
    found = inclusions(entry, [receipt.digest])[0]
    return replace(made, inclusion=found, entry_signature=KEY.sign(entry.hash))


# An answer's tokens, and the states that chose them.
Decoded = tuple[tuple[int, ...], Tensor]


@torch.inference_mode()
def decoded(
    network: Network,
    prompt: Sequence[int],
    tokens: int,
    temperature: float,
    seed: int,
    given: Sequence[int] | None = None,
) -> Decoded:
    """An answer token by token, as servers make it. Its tokens are ``given``, or drawn."""
    draw = torch.Generator().manual_seed(seed)
    decoder = decoder_of(network)
    cache, read = DynamicCache(), torch.tensor([prompt])
    output: list[int] = []
    states = []
    for place in range(tokens):
        with emulated(decoder, network.kernels, is_layer=False):
            made = decoder(input_ids=read, past_key_values=cache, use_cache=True)
        state = made.last_hidden_state[:, -1]
        states.append(state[0].float())
        token = given[place] if given else _drawn(logits_of(network, state)[0], temperature, draw)
        output.append(token)
        read = torch.tensor([[token]])
    return tuple(output), torch.stack(states)


def _drawn(logits: Tensor, temperature: float, draw: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    chances = torch.softmax(logits / temperature, -1)
    return int(torch.multinomial(chances, 1, generator=draw))
