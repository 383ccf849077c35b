"""Answers of an endpoint in token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from proofserve.protocol.receipts.record import Sampling
from proofserve.verifier.probe.endpoint import Alternatives, LeftOut, ProbePrompt, RawAnswer
from proofserve.verifier.written.readings import TopLogs, WrittenAnswer

if TYPE_CHECKING:
    from proofserve.verifier.validator import CheckpointTokenizer

# As the requests ask for; nothing but the temperature changes the logits.
_SAMPLED, _GREEDY = Sampling(temperature=1.0), Sampling(temperature=0.0)
# How vLLM writes a token if it is asked for ids.
_ID_PREFIX: Final = "token_id:"
# Servers write minus infinity as a large negative number, because JSON has none.
_LEAST_LOG: Final = -1000.0
FROM_SERVER, FROM_LOGS, FROM_TEXT = "token ids", "log-probabilities", "the text"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer(WrittenAnswer):
    """An answer whose token ids are known; ``ids_from`` says by what.

    There is an id of the prompt, and of the answer, at least. All tokens are read.
    """

    prompt: ProbePrompt
    text: str
    ids_from: str

    @property
    def number(self) -> int:
        return self.prompt.number


def resolved(raw: RawAnswer, tokens: "CheckpointTokenizer") -> ProbeAnswer | LeftOut:
    """The answer in token ids, or why they are not sure."""
    prompt = raw.prompt
    prompt_ids = tokens.prompt_ids(prompt.request)
    if fault := _other_prompt(raw, prompt_ids):
        return LeftOut(prompt, fault)
    if not raw.text and not raw.output_ids and not raw.alternatives:
        return LeftOut(prompt, "the answer is empty")
    found = _output_ids(raw, tokens)
    if found is None:
        return LeftOut(prompt, "the token ids of the answer cannot be told from its text", True)
    output, ids_from = found
    if not output or not all(0 <= each < tokens.size for each in output):
        return LeftOut(prompt, "the answer has no tokens, or such as the checkpoint has not")
    if raw.alternatives and len(output) == len(raw.alternatives) + 1 and raw.ended:
        output = output[:-1]
    if raw.alternatives and not _same_tokens(output, raw.alternatives, tokens):
        return LeftOut(prompt, "the log-probabilities are of other tokens than the answer")
    pairs = zip(raw.alternatives, output, strict=True) if raw.alternatives else ()
    tops = tuple(_top_logs(each, token, tokens) for each, token in pairs)
    sampling = _GREEDY if prompt.greedy else _SAMPLED
    known = (prompt_ids, output, sampling)
    return ProbeAnswer(*known, tops=tops, prompt=prompt, text=raw.text, ids_from=ids_from)


def _other_prompt(raw: RawAnswer, ids: tuple[int, ...]) -> str:
    """How the endpoint's prompt differs from ours; empty if it does not say so."""
    theirs = raw.prompt_tokens if raw.prompt_ids is None else len(raw.prompt_ids)
    if (raw.prompt_ids or ids) == ids and theirs in {None, len(ids)}:
        return ""
    return (
        f"the endpoint read a prompt of {theirs} tokens, the checkpoint's tokenizer and chat"
        f" template make {len(ids)}: it has another tokenizer or template"
    )


def _output_ids(
    raw: RawAnswer, tokens: "CheckpointTokenizer"
) -> tuple[tuple[int, ...], str] | None:
    if raw.output_ids:
        return raw.output_ids, FROM_SERVER
    if raw.alternatives:
        named = [_id_of(each.token, tokens) for each in raw.alternatives]
        ids = tuple(each for each in named if each is not None)
        if len(ids) == len(named):
            return ids, FROM_LOGS
    # The tokenizer's own ids of the text, if the endpoint counted as many.
    ids, counted = tokens.answer_ids(raw.text), raw.completion_tokens
    same = counted == len(ids) or (raw.ended and counted == len(ids) + 1)
    return (ids, FROM_TEXT) if same and tokens.text(ids) == raw.text else None


def _same_tokens(
    output: Sequence[int], alternatives: Sequence[Alternatives], tokens: "CheckpointTokenizer"
) -> bool:
    if len(output) != len(alternatives):
        return False
    named = (_id_of(each.token, tokens) for each in alternatives)
    return all(name in {None, token} for name, token in zip(named, output, strict=True))


def _top_logs(each: Alternatives, chosen: int, tokens: "CheckpointTokenizer") -> TopLogs:
    """Those whose ids are known and whose probability is told."""
    logs: dict[int, float] = {}
    for name, log in each.logs:
        token = chosen if name == each.token else _id_of(name, tokens)
        if token is not None and _LEAST_LOG < log <= 0.0:
            logs[token] = log
    return TopLogs(np.array([*logs], np.int64), np.array([*logs.values()], np.float64))


def _id_of(name: str, tokens: "CheckpointTokenizer") -> int | None:
    """None for a text that several ids stand for, or none."""
    if name.startswith(_ID_PREFIX) and name.removeprefix(_ID_PREFIX).isdecimal():
        token = int(name.removeprefix(_ID_PREFIX))
        return token if token < tokens.size else None
    return tokens.pieces.get(name)
