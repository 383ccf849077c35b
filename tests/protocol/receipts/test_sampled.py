"""The distribution of a token, against the functions by which vLLM changes logits."""

from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.receipts.sampled import log_probabilities, penalised, shortfall

LOGITS = np.random.default_rng(0).normal(0, 3, size=(6, 50))


def of_vllm(logits: Any, top_k: int, top_p: float) -> Any:
    k = torch.full((len(logits),), top_k) if top_k else None
    p = torch.full((len(logits),), top_p) if top_p < 1 else None
    made = apply_top_k_top_p(torch.from_numpy(logits).float().clone(), k, p)
    return made.log_softmax(dim=1).numpy()


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (10, 0.5), (1, 0.01)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_top_k_and_top_p_are_vllm_s(top_k: int, top_p: float, temperature: float) -> None:
    ours = log_probabilities(LOGITS, Sampling(temperature, top_p, top_k))
    theirs = of_vllm(LOGITS / temperature, top_k, top_p)
    assert np.array_equal(np.isneginf(ours), np.isneginf(theirs))
    assert np.allclose(np.exp(ours), np.exp(theirs), atol=1e-6)
    assert np.allclose(np.exp(ours).sum(axis=1), 1.0)


def test_min_p_keeps_what_is_likely_beside_the_likeliest() -> None:
    p = np.exp(log_probabilities(LOGITS, Sampling(min_p=0.1)))
    plain = np.exp(log_probabilities(LOGITS, Sampling()))
    kept = plain >= 0.1 * plain.max(axis=1, keepdims=True)
    assert np.array_equal(p > 0, kept)


def test_penalties_are_of_earlier_tokens() -> None:
    logits = np.array([[1.0, -1.0, 2.0, 0.5]] * 3)
    plain = penalised(logits, Sampling(), [0], [2, 2, 1])
    assert np.array_equal(plain, logits)
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    made = penalised(logits, sampling, [0], [2, 2, 1])
    # The prompt's token counts for the repetition penalty alone.
    assert made[0].tolist() == [0.5, -1.0, 2.0, 0.5]
    assert made[1].tolist() == [0.5, -1.0, 1.0 - 0.75, 0.5]
    assert made[2].tolist() == [0.5, -1.0, 1.0 - 1.0, 0.5]


def test_penalties_of_a_part_of_an_answer_know_the_tokens_before() -> None:
    rng = np.random.default_rng(1)
    logits, output = rng.normal(size=(8, 5)), rng.integers(5, size=8).tolist()
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.3)
    whole = penalised(logits, sampling, [1, 3], output)
    parts = [penalised(logits[i : i + 3], sampling, [1, 3], output, i) for i in (0, 3, 6)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_an_excluded_token_falls_short_of_the_least_kept_one() -> None:
    logits = np.array([[3.0, 2.0, 1.5, -4.0]] * 3)
    log_p = log_probabilities(logits, Sampling(top_k=2))
    assert shortfall(logits, log_p, np.array([1, 2, 3])).tolist() == [0.0, 0.5, 6.0]
