"""The token test with a model of our own, whose logits depend on the last token alone."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.lab.report import Progress
from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.receipts.sampled import log_probabilities
from proofserve.protocol.receipts.sketches import ReceiptScheme
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.verifier.chat.answers import Answer, GreedyLimit, judge_tokens
from proofserve.verifier.judges import Chances, Opinion

VOCABULARY = 50
CHANCES = Chances(alpha=1e-6, beta=1e-3)
LIMIT = GreedyLimit(gap=0.05, rate=0.001)
FRAUD, UNDECIDED = SequentialResult.FRAUD, SequentialResult.UNDECIDED


class TableModel:
    """The "state" behind a token is the token before it.

    Each of ``kernels`` moves every logit by ``noise``, as near a tie between experts.
    """

    def __init__(self, seed: int, kernels: Sequence[str] = (), noise: float = 0.0) -> None:
        self.table = np.random.default_rng(seed).normal(0, 3, (VOCABULARY, VOCABULARY))
        self.kernels = kernels
        self._noise = noise

    def states(
        self, prompt: Sequence[int], output: Sequence[int], _kernel: str | None = None
    ) -> NDArray[np.float32]:
        before = [prompt[-1], *output[:-1]]
        return np.array(before, np.float32)[:, np.newaxis]

    def logits(self, states: NDArray[np.float32], kernel: str | None = None) -> NDArray[np.float32]:
        table = self.table if kernel is None else self.by(kernel).table
        found: NDArray[np.float32] = table[states[:, 0].astype(int)].astype(np.float32)
        return found

    def by(self, kernel: str) -> "TableModel":
        """The model as an honest kernel computes it."""
        made = TableModel(0)
        seed = int.from_bytes(kernel.encode(), "big")
        noise = np.random.default_rng(seed).normal(0, self._noise, self.table.shape)
        made.table = self.table + noise
        return made

    def writes(self, number: int, sampling: Sampling, tokens: int = 100) -> Answer:
        draw = np.random.default_rng(number)
        output: list[int] = []
        for _ in range(tokens):
            logits = self.table[[output[-1] if output else 7]]
            if sampling.temperature == 0.0:
                output.append(int(logits.argmax()))
            else:
                p = np.exp(log_probabilities(logits, sampling))[0]
                output.append(int(draw.choice(VOCABULARY, p=p / p.sum())))
        scheme = ReceiptScheme("key", "00" * 32, 16)
        empty = np.zeros((tokens, 16), np.float32)
        return Answer(f"answer {number}", (7,), tuple(output), sampling, scheme, empty)


MODEL, OTHER = TableModel(0), TableModel(1)
GREEDY = Sampling(temperature=0.0)
NUCLEUS = Sampling(temperature=0.7, top_p=0.9, top_k=20)


def judged(*answers: Answer, greedy: GreedyLimit | None = LIMIT) -> Opinion:
    return judge_tokens(answers, MODEL, greedy, CHANCES, Progress())


@pytest.mark.parametrize("sampling", [Sampling(), NUCLEUS, GREEDY, Sampling(temperature=2.0)])
def test_own_tokens_are_not_convicted_and_another_model_s_are(sampling: Sampling) -> None:
    honest = judged(*(MODEL.writes(n, sampling) for n in range(20)))
    assert honest.result is UNDECIDED
    assert honest.nonces == 2000
    cheap = judged(*(OTHER.writes(n, sampling) for n in range(20)))
    assert cheap.result is FRAUD
    assert "of answer 0" in cheap.text


def test_a_token_that_top_k_excludes_is_named() -> None:
    answer = MODEL.writes(0, replace(NUCLEUS, top_k=5))
    least = int(MODEL.table[answer.output[49]].argmin())
    output = (*answer.output[:50], least, *answer.output[51:])
    found = judged(replace(answer, output=output))
    assert found.result is FRAUD
    assert found.text.startswith("token 50 of answer 0 cannot have been drawn as stated")


def test_a_token_just_below_the_least_kept_is_no_evidence() -> None:
    """A server rounds logits otherwise, and may keep another one of two that are nearly equal."""
    table, sampling = MODEL.table[7], Sampling(top_k=3)
    order = np.argsort(-table)
    near = TableModel(0)
    near.table[7, order[3]] = near.table[7, order[2]] - 0.1
    answer = replace(MODEL.writes(0, sampling, 1), output=(int(order[3]),))
    assert judge_tokens([answer], near, None, CHANCES, Progress()).result is UNDECIDED


NOISY = TableModel(0, [f"kernel {n}" for n in range(12)], noise=0.7)


@pytest.mark.parametrize("sampling", [Sampling(), NUCLEUS])
def test_a_kernel_that_moves_logits_by_much_is_as_honest_as_those_that_are_emulated(
    sampling: Sampling,
) -> None:
    """Its tokens are not drawn from the exact distribution: by that alone it would be convicted."""
    foreign = NOISY.by("a kernel that nobody emulates")
    answers = [foreign.writes(n, sampling) for n in range(60)]
    assert judge_tokens(answers, MODEL, None, CHANCES, Progress()).result is FRAUD
    honest = judge_tokens(answers, NOISY, None, CHANCES, Progress())
    assert (honest.result, honest.nonces) == (UNDECIDED, 6000)
    cheap = [OTHER.writes(n, sampling) for n in range(60)]
    assert judge_tokens(cheap, NOISY, None, CHANCES, Progress()).result is FRAUD


def test_an_excluded_token_counts_from_three_times_what_kernels_move() -> None:
    table, sampling = MODEL.table[7], Sampling(top_k=3)
    order = np.argsort(-table)
    moved = TableModel(0, NOISY.kernels, noise=0.3)
    for below, result in ((1.2, UNDECIDED), (6.0, FRAUD)):
        moved.table[7, order[3]] = moved.table[7, order[2]] - below
        answer = replace(MODEL.writes(0, sampling, 1), output=(int(order[3]),))
        assert judge_tokens([answer], moved, None, CHANCES, Progress()).result is result


def test_greedy_answers_need_a_calibration() -> None:
    found = judged(OTHER.writes(0, GREEDY), greedy=None)
    assert (found.result, found.nonces) == (UNDECIDED, 0)
    assert found.text.startswith("not tested")


def test_restricted_tokens_are_not_tested() -> None:
    answer = OTHER.writes(0, Sampling())
    found = judged(replace(answer, sampling=Sampling(restricted=True)))
    assert (found.result, found.nonces) == (UNDECIDED, 0)


def test_penalties_count() -> None:
    """With a penalty that the receipt does not state, tokens repeat too seldom."""
    stated = replace(MODEL.writes(0, Sampling()), sampling=Sampling(repetition_penalty=3.0))
    more = [replace(MODEL.writes(n, Sampling()), sampling=stated.sampling) for n in range(20)]
    assert judged(*more).result is FRAUD
