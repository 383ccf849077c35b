import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proofserve.protocol.draws import normal
from proofserve.protocol.identity import seed, words
from proofserve.protocol.network_schemes import input_embeddings

CPU = torch.device("cpu")
STRINGS = st.lists(st.text("abc_01", min_size=1), min_size=1, max_size=5)
SIZES = st.integers(1, 12)


@given(STRINGS, SIZES, SIZES)
def test_the_ordinary_form_is_one_draw_in_row_major_order(
    strings: list[str], seq_len: int, dim: int
) -> None:
    inputs = input_embeddings(strings, seq_len, dim, torch.bfloat16, CPU)
    flat = normal([seed(string) for string in strings], seq_len * dim, CPU, torch.bfloat16)
    assert inputs.shape == (len(strings), seq_len, dim)
    assert torch.equal(inputs.flatten(1), flat)


@given(STRINGS, SIZES, SIZES)
def test_the_stronger_form_joins_a_draw_per_digest_word(
    strings: list[str], seq_len: int, dim: int
) -> None:
    inputs = input_embeddings(strings, seq_len, dim, torch.float32, CPU, stronger=True)
    total = seq_len * dim
    length = -(-total // 8)
    for row, string in zip(inputs.flatten(1), strings, strict=True):
        segments = [
            normal([word], min(length, total - k * length), CPU)[0]
            for k, word in enumerate(words(string))
            if k * length < total
        ]
        assert torch.equal(row, torch.cat(segments))


@pytest.mark.parametrize("stronger", [False, True])
def test_a_sequence_does_not_depend_on_its_batch_mates(stronger: bool) -> None:
    alone = input_embeddings(["b"], 5, 7, torch.float16, CPU, stronger)
    together = input_embeddings(["a", "b", "c"], 5, 7, torch.float16, CPU, stronger)
    assert torch.equal(together[1:2], alone)
