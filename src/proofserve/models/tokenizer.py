"""The tokenizer of every model here: a byte-level BPE learned from the text in this package."""

from importlib import resources
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# They mark places in a conversation and never stand for text. The trainer numbers them in this
# order from 0.
SPECIALS: Final = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
PAD, BOS, TURN_START, TURN_END, TEXT_END = SPECIALS
# TURN_END ends a reply, TEXT_END ends a plain completion.
EOS_IDS: Final = (SPECIALS.index(TURN_END), SPECIALS.index(TEXT_END))

VOCABULARY: Final = 2048
"""Tokens, specials included: as many as the text is enough for; kernels need a multiple of 64."""

# Any role is accepted: these random models answer nonsense to a system prompt as to any other.
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def corpus() -> str:
    return resources.files("proofserve.models").joinpath("corpus.txt").read_text("utf-8")


def _train(text: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # No normaliser: decoding gives back the input, byte for byte.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    # A plain completion of an empty prompt still has a token to begin with.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, SPECIALS.index(BOS))]
    )
    return tokenizer


def build_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer, always to the same result, for a model of ``context`` positions."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_train(corpus()),
        bos_token=BOS,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START, TEXT_END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
