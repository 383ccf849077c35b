"""Texts and chats as windows of token ids."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from proofserve.models.architectures import BOS, TEXT_END
from training.texts import Chat, Docstring, chats, docstrings, documents, explained

# One docstring in so many is never trained on, and measures what was learned.
HELD_OUT_EVERY: Final = 50


@dataclass(frozen=True, slots=True)
class Data:
    """Token ids, int64 and 1-D each: ``train`` holds the ``chats`` too.

    ``held_out_bytes`` counts the bytes of the text of ``held_out``.
    """

    train: Tensor
    chats: Tensor
    held_out: Tensor
    held_out_bytes: int


def read(tokenizer: PreTrainedTokenizerFast, seed: int) -> Data:
    """Everything to learn from, in an order that ``seed`` decides."""
    random = Random(seed)  # noqa: S311 - an order, no secret
    trained, held_out = divided(docstrings(), random)
    items = [f"{BOS}{text}{TEXT_END}" for text in [*documents(), *explained(trained)]]
    talks = [_conversation(tokenizer, chat) for chat in chats(trained, random)]
    items += talks
    random.shuffle(items)
    random.shuffle(talks)
    return Data(
        _ids(tokenizer, items),
        _ids(tokenizer, talks),
        _ids(tokenizer, [f"{BOS}{text}{TEXT_END}" for text in explained(held_out)]),
        sum(len(text.encode()) for text in explained(held_out)),
    )


def divided(entries: list[Docstring], random: Random) -> tuple[list[Docstring], list[Docstring]]:
    """The docstrings to train on, and those held out; no text is in both."""
    entries = random.sample(entries, len(entries))
    trained = [entry for number, entry in enumerate(entries) if number % HELD_OUT_EVERY]
    known = {entry.text for entry in trained}
    return trained, [entry for entry in entries[::HELD_OUT_EVERY] if entry.text not in known]


def _conversation(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> str:
    turns = [
        {"role": "user", "content": chat.question},
        {"role": "assistant", "content": chat.answer},
    ]
    return str(tokenizer.apply_chat_template(turns, tokenize=False))


def _ids(tokenizer: PreTrainedTokenizerFast, items: list[str]) -> Tensor:
    encoded = tokenizer(items, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in ids])


def batches(ids: Tensor, length: int, size: int, seed: int) -> Iterator[Tensor]:
    """Yield windows of ``ids``, int64 [size, length + 1], without end.

    Each pass cuts at other places and takes the windows in another order.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = int(torch.randint(length, (1,), generator=generator))
        count = (len(ids) - start - 1) // length
        starts = start + length * torch.randperm(count, generator=generator)
        for chosen in torch.split(starts, size):
            if len(chosen) == size:
                yield torch.stack([ids[place : place + length + 1] for place in chosen.tolist()])
