"""The records of a probe: prompts, answers as the endpoint gave them, and answers in token ids."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


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
