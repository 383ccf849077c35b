import numpy as np
import pytest

from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.receipts.sketches import ReceiptScheme
from proofserve.remote.records import vectors_of
from proofserve.verifier.chat.answers import BLOCK_TOKENS, MOST_BLOCKS, Answer, Blocks

K_DIM = 16


def answer(number: int, tokens: int, key: str = "key") -> Answer:
    """Its sketches name their answer and token."""
    sketches = np.zeros((tokens, K_DIM), np.float32)
    sketches[:, 0], sketches[:, 1] = number, np.arange(tokens)
    scheme = ReceiptScheme(key, "00" * 32, K_DIM)
    return Answer(f"a{number}", (1, 2), tuple(range(tokens)), Sampling(), scheme, sketches)


def places(blocks: Blocks) -> list[list[tuple[int, int]]]:
    """The answer and the token of every row of every block, as the claims have them."""
    vectors = vectors_of(blocks.claims().claims, blocks.width)
    rows = [vectors[n].reshape(BLOCK_TOKENS, K_DIM)[:, :2].astype(int) for n in range(len(blocks))]
    return [[(a, t) for a, t in each.tolist()] for each in rows]


def test_tokens_are_cut_in_their_order_and_the_last_ones_are_left_out() -> None:
    found = places(Blocks([answer(0, 40)], "seed"))
    assert found == [[(0, t) for t in range(16)], [(0, t) for t in range(16, 32)]]


def test_a_block_may_have_tokens_of_two_answers() -> None:
    blocks = Blocks([answer(0, 10), answer(1, 22)], "seed")
    assert places(blocks) == [
        [(0, t) for t in range(10)] + [(1, t) for t in range(6)],
        [(1, t) for t in range(6, 22)],
    ]
    assert blocks.answers_of([0]) == [0, 1]
    assert blocks.answers_of([1]) == [1]
    assert blocks.within([1]) == [1]
    assert blocks.within([0, 1]) == [0, 1]
    assert blocks.conversations() == {0: 0, 1: 1}


def test_a_long_answer_counts_for_a_few_blocks_that_the_seed_chooses() -> None:
    first, again, other = (places(Blocks([answer(0, 1600)], seed)) for seed in "aab")
    assert len(first) == MOST_BLOCKS
    assert first == again
    assert first != other
    starts = [block[0][1] for block in first]
    assert starts == sorted(set(starts))
    assert all(start % BLOCK_TOKENS == 0 for start in starts)
    for block in first:
        assert [t for _, t in block] == list(range(block[0][1], block[0][1] + BLOCK_TOKENS))


def test_every_start_of_a_server_is_a_server_of_its_own() -> None:
    blocks = Blocks([answer(0, 32, "one"), answer(1, 32, "other"), answer(2, 16, "one")], "seed")
    assert list(blocks.by_server().values()) == [[0, 1, 4], [2, 3]]


@pytest.mark.parametrize("answers", [[], [15], [7, 8]])
def test_too_few_tokens_make_no_block(answers: list[int]) -> None:
    blocks = Blocks([answer(n, tokens) for n, tokens in enumerate(answers)], "seed")
    assert len(blocks) == 0
    assert blocks.claims().claims == ()
