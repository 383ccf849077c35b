"""Emulated kernels beside what real servers made of the trained model, here and elsewhere."""

import base64
import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from proofserve.cli.model import SmallModel, checkpoint
from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.kernels import (
    PROFILES,
    KernelProfile,
    Point,
    by_pytorch,
    own_profile,
)
from proofserve.engines.reference.network import Network, load, with_kernels
from proofserve.engines.reference.suspects import suspect
from proofserve.protocol.identity import Block
from proofserve.protocol.network_schemes import ArtifactScheme
from proofserve.protocol.scheme import Scheme
from proofserve.protocol.sketch import SketchScheme
from proofserve.rounds.records import Workload

Vectors = NDArray[np.float32]

# What vLLM served on another processor, which nothing here was fitted to.
FOREIGN = Path(__file__).parents[1] / "data" / "vectors-amd-zen3.json"
COMPILING = FOREIGN.with_name("vectors-compiling.json")
AMX = FOREIGN.with_name("vectors-amx.json")
ON_RANKS = FOREIGN.with_name("vectors-avx512-ranks.json")
TWO_RANKS = FOREIGN.with_name("vectors-two-ranks.json")
SUSPECTS = ("int8 per channel", "int8 g32", "fp8 per channel", "int4 g128")
CUTTING = "vLLM on x86 without bfloat16"
NONCES = 16


class Trained:
    """The trained model's vectors in ``scheme``, float32 [NONCES, width], each computed once."""

    def __init__(self, scheme: Scheme) -> None:
        self.network = load(checkpoint(SmallModel("trained")), "float32", "cpu")
        self._work = Workload(scheme, Block("0xabc", 100), "me", 256)
        self.exact = self.of(self.network)
        self.own = self.errors(own_profile(torch.bfloat16))

    def of(self, network: Network) -> Vectors:
        return ReferenceEngine(8).compute(self._work, network, range(NONCES)).values

    def errors(self, profile: KernelProfile | None) -> Vectors:
        return self.of(with_kernels(self.network, profile)) - self.exact


def recorded(scheme: Scheme) -> Vectors:
    text = json.loads(FOREIGN.read_text())
    raw = base64.b64decode(text[scheme.name]["vectors_b64"])
    rows = np.frombuffer(raw, text["dtype"]).reshape(text["nonces"], scheme.width)
    return rows[:NONCES].astype(np.float32)


def cosines(errors: Vectors, others: Vectors) -> Vectors:
    lengths = np.linalg.norm(errors, axis=1) * np.linalg.norm(others, axis=1)
    return (errors * others).sum(axis=1) / lengths


def alike(errors: Vectors) -> Vectors:
    return cosines(*np.split(errors, 2, axis=1))


def sizes(errors: Vectors) -> Vectors:
    return np.log(np.linalg.norm(errors, axis=1))


def same(one: Vectors, other: Vectors) -> bool:
    """Whether figures of the same nonces differ by less than three standard errors."""
    apart = one - other
    return bool(abs(apart.mean()) <= 3 * apart.std(ddof=1) / math.sqrt(len(apart)))


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained(SketchScheme(k_dim=64))


def test_our_own_profile_is_as_large_and_as_alike_as_torch_in_bfloat16(trained: Trained) -> None:
    real = trained.of(load(checkpoint(SmallModel("trained")), "bfloat16", "cpu")) - trained.exact
    assert sizes(real).mean() == pytest.approx(sizes(trained.own).mean(), abs=0.06)
    assert same(alike(real), alike(trained.own))
    assert cosines(real, trained.own).mean() > 0.3


def served_by(
    file: Path, network: Network
) -> tuple[Vectors, Callable[[KernelProfile | None], Vectors]]:
    """The errors of a recorded server's nonces, and a function that gives those of a profile."""
    text = json.loads(file.read_text())
    scheme, nonces = SketchScheme(k_dim=64), range(text["nonces"])
    block = Block(text["block_hash"], text["block_height"])
    work = Workload(scheme, block, text["public_key"], text["seq_len"])
    raw = base64.b64decode(text["sketch-v2"]["vectors_b64"])
    served = np.frombuffer(raw, text["dtype"]).reshape(len(nonces), scheme.width)

    def of(profile: KernelProfile | None) -> Vectors:
        return ReferenceEngine(8).compute(work, with_kernels(network, profile), nonces).values

    exact = of(None)
    return served.astype(np.float32) - exact, lambda profile: of(profile) - exact


def keeps_what_orders_keep(
    found: Vectors, of: Callable[[KernelProfile | None], Vectors], profile: KernelProfile
) -> bool:
    """Whether a server is as like our run as two of our runs in two orders are like each other."""
    one, other = (of(replace(profile, order=order)) for order in (1001, 1002))
    kept = (cosines(found, one) + cosines(found, other)) / 2
    return bool(kept.mean() > 0.93 * cosines(one, other).mean())


@pytest.mark.parametrize(
    ("file", "profile"),
    [
        (AMX, PROFILES["vLLM on x86 with AMX"]),
        (COMPILING, by_pytorch(PROFILES["vLLM on x86 with bfloat16"])),
        (ON_RANKS, replace(PROFILES[CUTTING], ranks=2)),
    ],
    ids=["AMX", "compiling", "two ranks with AVX-512"],
)
def test_a_server_keeps_what_two_orders_keep(
    trained: Trained, file: Path, profile: KernelProfile
) -> None:
    """Wherever they ran, whatever the order of this machine."""
    found, of = served_by(file, trained.network)
    assert keeps_what_orders_keep(found, of, profile)
    others = (PROFILES[name] for name in (CUTTING, "vLLM on a GPU"))
    assert not any(keeps_what_orders_keep(found, of, each) for each in others)


def test_an_order_is_that_of_attention_too() -> None:
    """Where a kernel rounds its weights, and where torch's own attention stands for it."""
    query, key, value = torch.randn(3, 1, 2, 32, 16)
    for name in ("vLLM on x86 with AMX", "vLLM on x86 with bfloat16"):
        exact = replace(PROFILES[name], format="float32")
        made = [
            replace(exact, order=order).attention(
                functional.scaled_dot_product_attention, query, key, value, is_causal=True
            )
            for order in (None, 3, 7)
        ]
        assert not any(torch.equal(*two) for two in combinations(made, 2))
        for each in made[1:]:
            torch.testing.assert_close(each, made[0], rtol=1e-4, atol=1e-5)


def test_ranks_on_a_processor_with_avx2_add_up_by_gloo(trained: Trained) -> None:
    """vLLM's own sums over ranks, which cut off, are only in its build for AVX-512."""
    found, of = served_by(TWO_RANKS, trained.network)
    two = replace(PROFILES[CUTTING], ranks=2)
    assert keeps_what_orders_keep(found, of, replace(two, by_gloo=True))
    assert not keeps_what_orders_keep(found, of, two)


def test_a_server_that_compiles_runs_operations_of_pytorch(trained: Trained) -> None:
    """vLLM's default: proofs skip the compiled graph, and vLLM's own operations are off."""
    found, of = served_by(COMPILING, trained.network)
    eager = PROFILES["vLLM on x86 with bfloat16"]
    assert cosines(found, of(by_pytorch(eager))).mean() > 0.5
    assert cosines(found, of(eager)).mean() < 0.35
    # PyTorch takes the nearest number where vLLM cuts off.
    assert (cut := by_pytorch(PROFILES[CUTTING])) is not None
    turned = torch.tensor([1 + 1.4 / 128])
    assert float(cut.at(Point.ROTATED, turned)) == 1 + 1 / 128
    assert float(cut.at(Point.ROTATED, -turned - 0.2 / 128)) == -1 - 2 / 128
    # What has none of vLLM's operations stays as it is.
    assert by_pytorch(PROFILES["torch"]) is None is by_pytorch(PROFILES["compiled"])


def test_kernels_of_a_foreign_processor_are_among_the_emulated(trained: Trained) -> None:
    found = recorded(SketchScheme(k_dim=64)) - trained.exact
    emulated = trained.errors(PROFILES[CUTTING])
    # Most of it is one and the same error; our own run shares a fifth.
    assert cosines(found, emulated).mean() > 0.5
    assert cosines(found, trained.own).mean() < 0.4
    for figure in (sizes, alike):
        assert same(figure(found), figure(emulated))
    assert not same(alike(found), alike(trained.own))
    spread = (sizes(found) - sizes(trained.own)).std()
    assert spread == pytest.approx((sizes(emulated) - sizes(trained.own)).std(), rel=0.5)
    for name in SUSPECTS:
        prediction = trained.of(suspect(trained.network, name)) - trained.exact
        assert same(cosines(found, prediction), cosines(emulated, prediction)), name


def test_artifacts_of_a_foreign_processor_are_as_the_emulated() -> None:
    scheme = ArtifactScheme(k_dim=12)
    trained = Trained(scheme)
    found = recorded(scheme) - trained.exact
    emulated = trained.errors(PROFILES[CUTTING])
    assert same(sizes(found), sizes(emulated))
    assert cosines(found, emulated).mean() > cosines(found, trained.own).mean()
