"""Prompts of a probe, and its answers: as the endpoint gave them, and in token ids."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.chats import WORDS

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
# Names of the published weights, as exact as the validator computes and as it would serve them.
PUBLISHED, SERVED = "published", "served"


class Kind(StrEnum):
    """The two routes that a probe asks."""

    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True)
class ProbePrompt:
    """``greedy`` asks for a temperature of 0, else 1 without top-k and top-p."""

    number: int
    kind: Kind
    text: str
    greedy: bool


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


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The chosen token, and tokens with their log-probabilities, the chosen one among them."""

    token: str
    logs: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """An answer as the endpoint gave it; None is what it did not say.

    ``alternatives`` has one entry for each token, none without log-probabilities.
    """

    prompt: ProbePrompt
    text: str
    finish_reason: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None
    alternatives: tuple[Alternatives, ...] = ()


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A prompt without an answer that can be judged; ``unsure`` if its token ids are not told."""

    prompt: ProbePrompt
    reason: str
    unsure: bool = False


@dataclass(frozen=True, slots=True)
class TopLogs:
    """Log-probabilities float64 [k] of the token ids int64 [k], for one place of an answer."""

    ids: NDArray[np.int64]
    logs: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokensRead:
    """What a model reads: the ids of a prompt and of its answer, one of each at least."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """An answer whose token ids are known; ``ids_from`` says by what.

    ``tops`` has one entry for each token of the answer, none without log-probabilities.
    """

    prompt: ProbePrompt
    text: str
    read: TokensRead
    ids_from: str
    tops: tuple[TopLogs, ...] = ()
