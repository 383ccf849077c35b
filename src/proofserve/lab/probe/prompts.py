"""Seeded prompts: ordinary requests for text, no two alike."""

import random
from collections.abc import Iterator, Sequence

from proofserve.lab.client.chats import WORDS
from proofserve.lab.probe.records import Kind, ProbePrompt

_REQUESTS = (
    "Write a short story about a {} and a {}. Mention the {}.",
    "Explain to a child how a {} differs from a {}, with an example about a {}.",
    "Describe a {} {} in the {} as vividly as you can.",
    "Give three reasons why a {} {} needs a {}.",
    "What would you ask the owner of a {} {} about the {}?",
    "Continue this sentence with a whole paragraph: the {} {} near the {}",
)
_BEGINNINGS = (
    "The {} of the {} was known for its {}, and",
    "Once there was a {} {} beside the {}. It",
    "Notes on the {}, the {} and the {}:\n\n1.",
    "In the {} stood a {} {}, which",
    "A {} is not a {}. The {}",
)


def prompts(seed: str, count: int, kinds: Sequence[Kind]) -> Iterator[ProbePrompt]:
    """``count`` prompts of ``kinds`` in turn; the same seed always gives the same ones.

    One of each kind is sampled, then one of each greedy. Of four prompts in a row with two kinds
    there is one of every sort.
    """
    draw = random.Random(f"proofserve probe {seed}")  # noqa: S311 - a prompt, no secret
    seen: set[str] = set()
    for number in range(count):
        kind = kinds[number % len(kinds)]
        templates = _REQUESTS if kind is Kind.CHAT else _BEGINNINGS
        while (text := draw.choice(templates).format(*draw.sample(WORDS, 3))) in seen:
            pass
        seen.add(text)
        yield ProbePrompt(number, kind, text, greedy=number // len(kinds) % 2 == 1)
