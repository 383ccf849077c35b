"""A checkpoint as the validator of chat answers: its tokenizer, and what its networks compute."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from proofserve.engines.reference.engine import Run
from proofserve.engines.reference.kernels import with_kernels
from proofserve.engines.reference.network import Network
from proofserve.engines.reference.reading import logits_of, states_of
from proofserve.lab.report import LabError
from proofserve.protocol.receipts.sketches import ReceiptScheme, sketches
from proofserve.rounds.records import ProofBatch
from proofserve.verifier.chat.answers import Answer, Blocks
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup


class CheckpointTokenizer:
    """The checkpoint's tokenizer and chat template. Raises LabError if it cannot be loaded.

    ``end_ids`` end an answer and do not show in its text; ``tells_time`` says that the template
    writes the date into prompts.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise LabError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
        self.end_ids = _end_ids(folder, self._tokenizer.eos_token_id)
        self.tells_time = "strftime_now" in str(self._tokenizer.chat_template)

    def prompt_ids(self, request: Mapping[str, Any]) -> tuple[int, ...]:
        """The ids of a request's prompt. Raises LabError if its fields make none."""
        prompt = request.get("prompt")
        if isinstance(prompt, str):
            return tuple(self._tokenizer(prompt)["input_ids"])
        if isinstance(prompt, list) and prompt and all(isinstance(each, int) for each in prompt):
            return tuple(prompt)
        if not isinstance(request.get("messages"), list):
            raise LabError("request: it has neither messages nor one prompt")
        return self._of_template(request)

    def answer_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, ids: tuple[int, ...]) -> str:
        """The text of an answer's ids, without special tokens."""
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _of_template(self, request: Mapping[str, Any]) -> tuple[int, ...]:
        try:
            made = self._tokenizer.apply_chat_template(
                request["messages"],
                tools=request.get("tools"),
                chat_template=request.get("chat_template"),
                add_generation_prompt=request.get("add_generation_prompt", True),
                continue_final_message=request.get("continue_final_message", False),
                tokenize=True,
                return_dict=True,
                **(request.get("chat_template_kwargs") or {}),
            )
        # A template is a program in the checkpoint, and raises what it likes.
        except Exception as error:
            raise LabError(
                f"messages: the checkpoint's chat template refuses them: {error}"
            ) from error
        return tuple(made["input_ids"])


def _end_ids(folder: Path, of_tokenizer: int | None) -> tuple[int, ...]:
    """The tokens that end an answer: of ``generation_config.json``, and the tokenizer's own."""
    try:
        stated = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except OSError:
        stated = None
    several = stated if isinstance(stated, list) else [stated]
    return tuple(dict.fromkeys(each for each in (*several, of_tokenizer) if each is not None))


class AnswerForwards:
    """The sketches that a network gives for the answers of ``blocks``, by block.

    One forward reads a whole answer, so all blocks of an answer come with the first of them.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._rows: dict[ReceiptScheme, Tensor] = {}

    def __call__(self, runs: Sequence[Run]) -> list[ProofBatch]:
        """Raises EngineFault as ``states_of``."""
        return [self._of(run) for run in runs]

    def _of(self, run: Run) -> ProofBatch:
        needed = self._blocks.answers_of(run.nonces)
        found = {index: self._sketches(run, self._blocks.answers[index]) for index in needed}
        computed = self._blocks.within(needed)
        vectors = self._blocks.vectors(found, computed)
        finite = np.isfinite(vectors).all(axis=1).reshape(-1)
        numbered = list(zip(computed, finite.tolist(), strict=True))
        good = tuple(number for number, is_finite in numbered if is_finite)
        failed = tuple(number for number, is_finite in numbered if not is_finite)
        return ProofBatch(good, vectors[finite], failed)

    def _sketches(self, run: Run, answer: Answer) -> NDArray[np.float32]:
        scheme, network = answer.scheme, run.network
        if scheme not in self._rows:
            self._rows[scheme] = scheme.rows(network.facts.hidden_size, network.device)
        states = states_of(network, answer.prompt, answer.output, run.experts)
        made: NDArray[np.float32] = sketches(states, self._rows[scheme]).cpu().numpy()
        return made


class ChatValidator(CheckpointValidator):
    """A validator of blocks of answers, and the published model as a reader of their tokens.

    At first it knows no answers: ``reading`` makes a validator of some.
    """

    def __init__(self, setup: ValidatorSetup) -> None:
        super().__init__(setup, AnswerForwards(Blocks((), "")))

    def reading(self, blocks: Blocks) -> Self:
        return self.with_other(AnswerForwards(blocks))

    def states(self, answer: Answer, kernel: str | None = None) -> NDArray[np.float32]:
        """The states [tokens, hidden] behind the tokens. Raises EngineFault."""
        network = self._emulating(kernel)
        found: NDArray[np.float32] = states_of(network, answer.prompt, answer.output).cpu().numpy()
        return found

    def logits(self, states: NDArray[np.float32], kernel: str | None = None) -> NDArray[np.float32]:
        """[n, vocabulary] of ``states`` [n, hidden]."""
        on_device = torch.from_numpy(states).to(self.published.device)
        made = logits_of(self._emulating(kernel), on_device)
        found: NDArray[np.float32] = made.cpu().numpy()
        return found

    def _emulating(self, kernel: str | None) -> Network:
        if kernel is None:
            return self.published
        return with_kernels(self.published, self._kernels[kernel])
