"""The distribution from which a server draws a token, from the model's logits.

In the order in which vLLM changes logits: penalties, temperature, min-p, top-k, top-p.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.receipts.record import Sampling

Floats = NDArray[np.float64]


def log_probabilities(logits: Floats, sampling: Sampling) -> Floats:
    """log p float64 [n, vocabulary] of ``logits`` with penalties; minus infinity if excluded.

    Only for a temperature above 0: a greedy answer has no distribution.
    """
    scaled = logits / sampling.temperature
    if sampling.min_p > 0.0:
        least = scaled.max(axis=1, keepdims=True) + np.log(sampling.min_p)
        scaled = np.where(scaled < least, -np.inf, scaled)
    if 0 < sampling.top_k < scaled.shape[1]:
        least = np.partition(scaled, -sampling.top_k, axis=1)[:, [-sampling.top_k]]
        scaled = np.where(scaled < least, -np.inf, scaled)
    if sampling.top_p < 1.0:
        scaled = _nucleus(scaled, sampling.top_p)
    return _normalised(scaled)


def penalised(
    logits: Floats, sampling: Sampling, prompt: Sequence[int], output: Sequence[int], first: int = 0
) -> Floats:
    """``logits`` [n, vocabulary] less what earlier tokens cost.

    Row t chose token ``first + t`` of ``output``, so it knows the prompt and the tokens before.
    """
    made = logits.astype(np.float64)
    counts = np.bincount(np.array(output[:first], np.int64), minlength=made.shape[1]).astype(float)
    in_prompt = np.zeros(made.shape[1], bool)
    in_prompt[list(prompt)] = True
    for t, token in enumerate(output[first : first + len(made)]):
        seen = in_prompt | (counts > 0)
        repeated = sampling.repetition_penalty
        factor = np.where(made[t] > 0, 1.0 / repeated, repeated)
        made[t, seen] *= factor[seen]
        made[t] -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        counts[token] += 1
    return made


def shortfall(logits: Floats, log_p: Floats, tokens: NDArray[np.int64]) -> Floats:
    """How far the logit of each of ``tokens`` is below the least that is not excluded: float64 [n].

    ``logits`` [n, vocabulary] are with penalties, ``log_p`` from ``log_probabilities``. 0 for a
    token that is not excluded.
    """
    least = np.where(np.isneginf(log_p), np.inf, logits).min(axis=1)
    missing: Floats = np.maximum(0.0, least - logits[np.arange(len(tokens)), tokens])
    return missing


def _nucleus(scaled: Floats, top_p: float) -> Floats:
    """Only the likeliest tokens whose probabilities reach ``top_p`` together, at least one."""
    p = np.exp(_normalised(scaled))
    order = np.argsort(p, axis=1)
    # vLLM drops from the least likely on, as long as what it drops is at most 1 - top_p.
    below = np.cumsum(np.take_along_axis(p, order, axis=1), axis=1) <= 1.0 - top_p
    below[:, -1] = False
    dropped = np.zeros_like(below)
    np.put_along_axis(dropped, order, below, axis=1)
    return np.where(dropped, -np.inf, scaled)


def _normalised(scaled: Floats) -> Floats:
    highest = scaled.max(axis=1, keepdims=True)
    total = np.log(np.exp(scaled - highest).sum(axis=1, keepdims=True))
    found: Floats = scaled - highest - total
    return found
