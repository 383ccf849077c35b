"""The tokenizer and the chat template of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from proofserve.lab.client.errors import LabError


class CheckpointTokenizer:
    """Implements ``lab.chat.chat_tokens.ChatTokenizer``. Raises LabError if it cannot be loaded."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise LabError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
        self.end_ids = _end_ids(folder, self._tokenizer.eos_token_id)
        self.tells_time = "strftime_now" in str(self._tokenizer.chat_template)

    def prompt_ids(self, request: Mapping[str, Any]) -> tuple[int, ...]:
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
