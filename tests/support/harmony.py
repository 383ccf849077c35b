"""gpt-oss's own vocabulary and format of chat, as vLLM writes it for that family (harmony).

The package ``oss-harmony`` brings the vocabulary; published checkpoints have it as a tokenizer of
transformers, which is built here from it.
"""

import json
import shutil
from pathlib import Path
from typing import Final

from openai_harmony import HarmonyEncoding, HarmonyEncodingName, load_harmony_encoding
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from support.quantised import rewrite

TOKENS: Final = 201_088
ORDINARY: Final = 199_998
"""Ids below stand for text, those from there on for places in a conversation."""

_PLACES: Final = {
    **{"bos_token": "<|startoftext|>", "eos_token": "<|return|>"},
    "pad_token": "<|endoftext|>",
}
# What splits a text before pairs are merged: "o200k" of tiktoken.
_LOWER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_OTHERS: Final = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Final = f"{_LOWER}{_ENDINGS}|{_UPPER}{_ENDINGS}|{_OTHERS}"
# A conversation of one user without tools, as vLLM writes it without a system message.
TEMPLATE: Final = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\n"
    "Current date: {{ strftime_now('%Y-%m-%d') }}\n\n"
    "Reasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final."
    " Channel must be included for every message.<|end|>"
    "{% for message in messages %}"
    "<|start|>{{ message['role'] }}<|message|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def encoding() -> HarmonyEncoding:
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def with_harmony(source: Path, folder: Path) -> None:
    """Copy the checkpoint ``source`` of this family to ``folder``, with that tokenizer."""
    shutil.copytree(source, folder)
    write_tokenizer(folder)
    rewrite(folder, bos_token_id=199_998, eos_token_id=200_002, pad_token_id=199_999)
    ends = {"eos_token_id": [200_002, 199_999, 200_012], "pad_token_id": 199_999}
    (folder / "generation_config.json").write_text(json.dumps(ends))


def write_tokenizer(folder: Path) -> None:
    harmony = encoding()
    pieces = [harmony._inner.decode_bytes([token]) for token in range(TOKENS)]
    letters = bytes_to_unicode()
    names = ["".join(letters[byte] for byte in piece) for piece in pieces[:ORDINARY]]
    model = models.BPE(
        {name: token for token, name in enumerate(names)},
        _merges(pieces[:ORDINARY], names),
        ignore_merges=True,
    )
    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([piece.decode() for piece in pieces[ORDINARY:]])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )
    made.add_special_tokens(_PLACES)
    made.save_pretrained(folder)


def _merges(pieces: list[bytes], names: list[str]) -> list[tuple[str, str]]:
    """The pairs of pieces that make a piece, in the order in which they are merged."""
    place = {piece: token for token, piece in enumerate(pieces)}
    merges = []
    for piece in pieces:
        pairs = [
            (place[piece[:cut]], place[piece[cut:]])
            for cut in range(1, len(piece))
            if piece[:cut] in place and piece[cut:] in place
        ]
        merges += [(names[first], names[second]) for first, second in sorted(pairs)]
    return merges
