"""The tokenizer of every model here: a byte-level BPE learned from the text in this package."""

from dataclasses import dataclass
from importlib import resources
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Special:
    """A token that marks a place in a conversation and never stands for text."""

    text: str
    id: int


PAD: Final = Special("<|pad|>", 0)
BOS: Final = Special("<|bos|>", 1)
TURN_START: Final = Special("<|im_start|>", 2)
TURN_END: Final = Special("<|im_end|>", 3)
TEXT_END: Final = Special("<|endoftext|>", 4)
# In the order of their ids, because the trainer numbers them so.
SPECIALS: Final = (PAD, BOS, TURN_START, TURN_END, TEXT_END)
# A turn ends a reply, the end of a text ends a plain completion.
EOS_IDS: Final = (TURN_END.id, TEXT_END.id)

VOCABULARY: Final = 2048
"""Tokens, specials included: as many as the text can teach, and a multiple of 64 for kernels."""

# Any role is accepted: these random models answer nonsense to a system prompt as to any other.
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def corpus() -> str:
    """Return the text that the merges are learned from."""
    return resources.files("proofserve.models").joinpath("corpus.txt").read_text("utf-8")


def _train(text: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # No normaliser: decoding gives back the input, byte for byte.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=[special.text for special in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    # A plain completion of an empty prompt still has a token to begin with.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS.text} $A",
        pair=f"{BOS.text} $A {BOS.text} $B:1",
        special_tokens=[(BOS.text, BOS.id)],
    )
    return tokenizer


def build_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer, always to the same result, for a model of ``context`` positions."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_train(corpus()),
        bos_token=BOS.text,
        eos_token=TURN_END.text,
        pad_token=PAD.text,
        additional_special_tokens=[TURN_START.text, TEXT_END.text],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
