"""The token ids of an answer, from what the endpoint says of it."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from proofserve.lab.probe.ports import Tokens
from proofserve.lab.probe.records import (
    Alternatives,
    Kind,
    LeftOut,
    ProbeAnswer,
    RawAnswer,
    TokensRead,
    TopLogs,
)

# How vLLM writes a token if it is asked for ids.
_ID_PREFIX: Final = "token_id:"
# Servers write minus infinity as a large negative number, because JSON has none.
_LEAST_LOG: Final = -1000.0
# Of the model's own tokens that end an answer, endpoints show the text nowhere.
_STOPPED: Final = "stop"
FROM_SERVER, FROM_LOGS, FROM_TEXT = "token ids", "log-probabilities", "the text"


def resolved(raw: RawAnswer, tokens: Tokens) -> ProbeAnswer | LeftOut:
    """The answer in token ids, or why they are not sure."""
    prompt = raw.prompt
    of_prompt = tokens.of_chat if prompt.kind is Kind.CHAT else tokens.of_completion
    prompt_ids = of_prompt(prompt.text)
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
    if raw.alternatives and len(output) == len(raw.alternatives) + 1 and _ended(raw):
        output = output[:-1]
    if raw.alternatives and not _same_tokens(output, raw.alternatives, tokens):
        return LeftOut(prompt, "the log-probabilities are of other tokens than the answer")
    tops = tuple(_top_logs(each, token, tokens) for each, token in _pairs(raw, output))
    return ProbeAnswer(prompt, raw.text, TokensRead(prompt_ids, output), ids_from, tops)


def _other_prompt(raw: RawAnswer, ids: tuple[int, ...]) -> str:
    """How the endpoint's prompt differs from ours; empty if it does not say so."""
    if raw.prompt_ids is not None:
        same = raw.prompt_ids == ids
    else:
        same = raw.prompt_tokens is None or raw.prompt_tokens == len(ids)
    if same:
        return ""
    theirs = raw.prompt_tokens if raw.prompt_ids is None else len(raw.prompt_ids)
    return (
        f"the endpoint read a prompt of {theirs} tokens, the checkpoint's tokenizer and chat"
        f" template make {len(ids)}: it has another tokenizer or template"
    )


def _output_ids(raw: RawAnswer, tokens: Tokens) -> tuple[tuple[int, ...], str] | None:
    if raw.output_ids:
        return raw.output_ids, FROM_SERVER
    if raw.alternatives:
        named = [_id_of(each.token, tokens) for each in raw.alternatives]
        ids = tuple(each for each in named if each is not None)
        if len(ids) == len(named):
            return ids, FROM_LOGS
    return _from_text(raw, tokens)


def _from_text(raw: RawAnswer, tokens: Tokens) -> tuple[tuple[int, ...], str] | None:
    """The tokenizer's own ids of the text, if the endpoint counted as many."""
    ids = tokens.of_answer(raw.text)
    if tokens.text_of(ids) != raw.text:
        return None
    counted = raw.completion_tokens
    if counted != len(ids) and not (_ended(raw) and counted == len(ids) + 1):
        return None
    return ids, FROM_TEXT


def _ended(raw: RawAnswer) -> bool:
    return raw.finish_reason == _STOPPED


def _same_tokens(
    output: Sequence[int], alternatives: Sequence[Alternatives], tokens: Tokens
) -> bool:
    if len(output) != len(alternatives):
        return False
    named = (_id_of(each.token, tokens) for each in alternatives)
    return all(name in {None, token} for name, token in zip(named, output, strict=True))


def _pairs(raw: RawAnswer, output: Sequence[int]) -> list[tuple[Alternatives, int]]:
    return list(zip(raw.alternatives, output, strict=True)) if raw.alternatives else []


def _top_logs(each: Alternatives, chosen: int, tokens: Tokens) -> TopLogs:
    """Those whose ids are known and whose probability is told."""
    logs: dict[int, float] = {}
    for name, log in each.logs:
        token = chosen if name == each.token else _id_of(name, tokens)
        if token is not None and _LEAST_LOG < log <= 0.0:
            logs[token] = log
    return TopLogs(np.array([*logs], np.int64), np.array([*logs.values()], np.float64))


def _id_of(name: str, tokens: Tokens) -> int | None:
    """None for a text that several ids stand for, or none."""
    if name.startswith(_ID_PREFIX) and name.removeprefix(_ID_PREFIX).isdecimal():
        token = int(name.removeprefix(_ID_PREFIX))
        return token if token < tokens.size else None
    return tokens.pieces.get(name)
