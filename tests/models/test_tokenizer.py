import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from proofserve.models.architectures import SPECIALS, VOCABULARY, build_tokenizer, corpus
from proofserve.models.writer import ModelSummary

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces,\ttab,\n\nempty line,\r\nand a trailing space ",
    "def f(x: int) -> int:\n    return x ** 2  # 3.14159\n",
    "Żółć, ñandú, e\u0301 and \u00e9, ﬁ, Ω, Ж, 漢字, 한국어, हिन्दी, עברית, العربية",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🧪 \u200b \ufeff \x00 \x7f \U0010fffd",
    "",
]


@pytest.fixture(scope="module")
def fresh() -> PreTrainedTokenizerFast:
    return build_tokenizer(context=4096)


def _loaded(tiny: ModelSummary) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(tiny.path)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def test_text_comes_back_as_it_went_in(tiny: ModelSummary) -> None:
    tokenizer = _loaded(tiny)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_id_of_the_model_is_a_token(fresh: PreTrainedTokenizerFast) -> None:
    assert len(fresh) == VOCABULARY
    assert sorted(fresh.get_vocab().values()) == list(range(VOCABULARY))


def test_special_tokens_have_their_ids_and_roles(tiny: ModelSummary) -> None:
    tokenizer = _loaded(tiny)
    ids = list(range(len(SPECIALS)))
    assert [tokenizer.convert_tokens_to_ids(special) for special in SPECIALS] == ids
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == (
        "<|pad|>",
        "<|bos|>",
        "<|im_end|>",
    )
    assert set(tokenizer.all_special_ids) == set(ids)


def test_it_knows_english_better_than_bytes(fresh: PreTrainedTokenizerFast) -> None:
    text = "The people of the town know the number of the houses, and they write it down."
    assert len(fresh(text)["input_ids"]) < len(text) / 2.5


def test_training_twice_gives_the_same_tokenizer(fresh: PreTrainedTokenizerFast) -> None:
    again = build_tokenizer(context=4096)
    assert again.backend_tokenizer.to_str() == fresh.backend_tokenizer.to_str()


def test_the_text_is_long_and_varied_enough() -> None:
    assert 20_000 < len(corpus()) < 40_000
    assert len(set(corpus())) > 200


def test_chat_template_renders(tiny: ModelSummary) -> None:
    tokenizer = _loaded(tiny)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How are you? 🙂"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHow are you? 🙂<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    closed = tokenizer.apply_chat_template(messages, tokenize=False)
    assert closed.endswith("<|im_end|>\n")
