"""Questions and answers, so that the model knows when to speak and when its answer ends."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from training.text import Docstring

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
            yield Chat(_question(short, random), _sentence(answer))


def _question(name: str, random: Random) -> str:
    return random.choice(QUESTIONS).format(name=name)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?", ":")) else ".")
