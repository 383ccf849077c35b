"""Answers in harmony: the text that vLLM shows of their tokens is no fraud, whatever they are."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm.parser.harmony import HarmonyParser

from proofserve.reports import ReportedError
from proofserve.verifier.chat.conversation import ChatChoice
from proofserve.verifier.chat.statements import FailedCheck, NodeFacts, Statement
from proofserve.verifier.validator import CheckpointTokenizer
from support.harmony import ORDINARY, TOKENS, encoding, write_tokenizer
from support.provider import Node

PLAN = "<|channel|>commentary<|message|>A plan.<|end|><|start|>assistant"
ANSWERS = {
    "plain": "<|channel|>final<|message|>Yes.<|return|>",
    "two parts": f"{PLAN}<|channel|>final<|message|>Yes.<|return|>",
    "cut in a part's name": f"{PLAN}<|channel|>fin",
    "cut before a part's name": f"{PLAN}<|channel|>",
    "a mark in a text": "<|channel|>final<|message|>Yes<|constrain|>No",
    "no format": "Yes.",
}


@dataclass(frozen=True)
class Server:
    """What vLLM shows of tokens, and whether a validator takes a text for theirs."""

    validators: CheckpointTokenizer
    engines: Any

    def shown(self, ids: tuple[int, ...]) -> str | None:
        _, text, _ = HarmonyParser(self.engines).parse("", None, model_output_token_ids=ids)
        return text

    def judged(self, ids: tuple[int, ...], text: str | None) -> str:
        node = Node()
        chat = node.chat("one")
        signed = replace(chat.receipts[0], receipt=node.receipt("one", chat.request, ids))
        statement = Statement(chat, signed, self.validators, NodeFacts(""))
        try:
            statement.output_ids(ChatChoice(0, text, ids))
        except FailedCheck:
            return "fraud"
        except ReportedError:
            return "not checked"
        return "checked"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("harmony")
    write_tokenizer(folder)
    return Server(CheckpointTokenizer(folder), AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_what_vllm_shows_of_an_answer_is_no_fraud(server: Server, answer: str) -> None:
    ids = tuple(encoding().encode(answer, allowed_special="all"))
    assert server.judged(ids, server.shown(ids)) != "fraud"


def test_what_vllm_shows_of_random_tokens_is_no_fraud(server: Server) -> None:
    draws = np.random.default_rng(1)
    # Marks are rare in a vocabulary, and frequent here.
    marks = range(ORDINARY, ORDINARY + 20)
    for _ in range(100):
        ids = np.where(
            draws.random(12) < 0.3, draws.choice(marks, 12), draws.integers(TOKENS, size=12)
        )
        read = tuple(map(int, ids))
        assert server.judged(read, server.shown(read)) != "fraud"


def test_another_text_is_not_checked(server: Server) -> None:
    ids = tuple(encoding().encode("Yes.", allowed_special="all"))
    assert server.judged(ids, "Yes.") == "checked"
    assert server.judged(ids, "No.") == "not checked"
