"""What the model reads, as windows of token ids: texts, and chats by which it knows when to speak.

The texts are Python's language reference, docstrings of its library and some prose.
"""

import ast
import inspect
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from proofserve.models.architectures import BOS, TEXT_END, corpus

# One docstring in so many is never trained on, and measures what was learned.
HELD_OUT_EVERY: Final = 50
# Tests and programs of the standard library, whose docstrings explain little to a reader.
LEFT_OUT: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
)
WRITTEN: Final = Path(__file__).with_name("chats.txt")
# The few written chats are learned by heart.
WRITTEN_COPIES: Final = 40
ANSWER_CHARACTERS: Final = range(24, 400)

QUESTIONS: Final = (
    "What does {name} do?",
    "What is {name}?",
    "Explain {name} to me.",
    "Can you tell me about {name}?",
    "When would I use {name}?",
    "Tell me what {name} is for.",
    "I read {name} in a program. What is it?",
)
_NAMED: Final = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Docstring:
    """``name`` has its module and class in front, with dots."""

    name: str
    text: str


def docstrings() -> list[Docstring]:
    """Every docstring of the standard library, in the order of its files.

    The modules are parsed and not imported: some act when they are imported.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Docstring] = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if LEFT_OUT.isdisjoint(parts):
            module = ".".join(part for part in parts if part != "__init__")
            found += _of(ast.parse(file.read_text("utf-8")), module)
    return found


def _of(node: ast.AST, name: str) -> Iterator[Docstring]:
    if isinstance(node, ast.Module | _NAMED) and (text := ast.get_docstring(node)):
        yield Docstring(name, inspect.cleandoc(text))
    for child in ast.iter_child_nodes(node):
        yield from _of(child, f"{name}.{child.name}" if isinstance(child, _NAMED) else name)


def documents() -> list[str]:
    """The texts beside the docstrings."""
    return [*corpus().split("\n\n"), *(text for _, text in sorted(topics.items()))]


def explained(entries: list[Docstring]) -> list[str]:
    return [f"{entry.name}\n\n{entry.text}\n" for entry in entries]


@dataclass(frozen=True, slots=True)
class Chat:
    question: str
    answer: str


def written_chats() -> list[Chat]:
    """The chats of ``chats.txt``: blocks of lines, questions and then their one answer."""
    found = []
    for block in WRITTEN.read_text("utf-8").strip().split("\n\n"):
        *questions, answer = block.split("\n")
        found += [Chat(question, answer) for question in questions]
    return found


def chats(entries: list[Docstring], random: Random) -> list[Chat]:
    """Chats about the standard library, and the written ones."""
    return [*_about(entries, random), *written_chats() * WRITTEN_COPIES]


def _about(entries: list[Docstring], random: Random) -> Iterator[Chat]:
    for entry in entries:
        private = any(part.startswith("_") for part in entry.name.split("."))
        answer = " ".join(entry.text.split("\n\n")[0].split())
        if not private and len(answer) in ANSWER_CHARACTERS and answer.isascii():
            short = ".".join(entry.name.split(".")[-2:])
            yield Chat(random.choice(QUESTIONS).format(name=short), _sentence(answer))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?", ":")) else ".")


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
