import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from proofserve.engines import CheckpointError
from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.network import Network, load
from proofserve.protocol.identity import Block
from proofserve.protocol.network_schemes import ArtifactScheme, DistanceScheme
from proofserve.protocol.scheme import ModelFacts, Scheme
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import Workload
from support.models import SmallModels

Vectors = NDArray[np.float32]

PLAIN = ArtifactScheme()


def work_of(scheme: Scheme = PLAIN, seq_len: int = 32) -> Workload:
    return Workload(scheme, Block("0xabc", 7), "node-key", seq_len)


@pytest.fixture(scope="module")
def network(small_models: SmallModels) -> Network:
    return load(small_models.get("qwen3"), None, "cpu")


def values(network: Network, nonces: Sequence[int], work: Workload | None = None) -> Vectors:
    return ReferenceEngine(4).compute(work or work_of(), network, nonces).values


@torch.inference_mode()
def test_it_is_the_last_hidden_state_of_the_checkpoint(tiny: Path, network: Network) -> None:
    whole = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).eval()
    block = PLAIN.for_block(
        Block("0xabc", 7), ModelFacts(whole.config.hidden_size), torch.device("cpu")
    )
    inputs = block.inputs("node-key", range(4), 32, torch.bfloat16)
    states = whole(inputs_embeds=inputs, output_hidden_states=True, use_cache=False).hidden_states
    expected = block.finish("node-key", range(4), states[-1][:, -1]).numpy()
    assert np.array_equal(values(network, range(4)), expected)


def test_a_vector_depends_on_its_mates_by_the_order_of_sums_alone(
    small_models: SmallModels,
) -> None:
    network = load(small_models.get("qwen3"), "float32", "cpu")
    alone = [values(network, [nonce])[0] for nonce in (5, 3, 900)]
    together = values(network, [7, 900, 1, 5, 2, 3])
    # float32 rounds by 2^-24. Two orders of a sum of n numbers differ by 2 n of these at most; the
    # model has six layers, whose sums have up to 512 numbers. A mate's state would be 0.1 away.
    assert np.abs(together[[3, 5, 1]] - np.array(alone)).max() < 6 * 2 * 512 * 2**-24


@pytest.mark.parametrize("arch", ["qwen3", "llama", "gemma3"])
@pytest.mark.parametrize(
    "scheme",
    [
        PLAIN,
        ArtifactScheme(layer_reflections=True, stronger_rng=True),
        DistanceScheme(sign_flips=False, layer_hooks=True),
    ],
    ids=lambda scheme: scheme.name,
)
def test_every_architecture_does_every_scheme(
    arch: str, scheme: Scheme, small_models: SmallModels
) -> None:
    checkpoint = small_models.get(arch)
    some, others = (
        ReferenceEngine(4).compute(work_of(scheme), load(checkpoint, dtype, "cpu"), range(6))
        for dtype in ("bfloat16", "float32")
    )
    assert some.values.shape == (6, scheme.width)
    # Rounding moves a vector of length 1 a little, and other layers' reflections all the way.
    assert 0 < np.linalg.norm(some.values - others.values, axis=1).max() < 0.2


def test_layer_transforms_leave_nothing_behind(network: Network) -> None:
    before = values(network, range(4))
    reflected = values(network, range(4), work_of(ArtifactScheme(layer_reflections=True)))
    assert np.linalg.norm(reflected - before, axis=1).min() > 0.1
    assert np.array_equal(values(network, range(4)), before)


def test_a_row_that_is_not_finite_is_named(small_models: SmallModels) -> None:
    broken = load(small_models.broken(), None, "cpu")
    batch = ReferenceEngine(4).compute(work_of(), broken, range(3))
    assert (batch.nonces, batch.failed) == ((), (0, 1, 2))
    assert batch.values.shape == (0, 12)


def test_nothing_asked_is_nothing_computed(network: Network) -> None:
    assert values(network, []).shape == (0, 12)


def test_what_the_model_cannot_do_is_a_fault(network: Network) -> None:
    with pytest.raises(EngineFault, match="seq_len 1000000 exceeds"):
        values(network, [0], work_of(seq_len=10**6))
    with pytest.raises(EngineFault, match="k_dim"):
        values(network, [0], work_of(ArtifactScheme(k_dim=100_000)))


@pytest.mark.parametrize(
    ("dtype", "device", "message"),
    [
        ("int3", "cpu", "unknown dtype 'int3'; choose from bfloat16"),
        (None, "abacus", "unknown device 'abacus'"),
    ],
)
def test_a_wish_that_cannot_be_met_is_named(
    tiny: Path, dtype: str | None, device: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tiny, dtype, device)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load(tmp_path, None, "cpu")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(tmp_path, None, "cpu")


def test_vectors_have_length_one(network: Network) -> None:
    lengths = np.linalg.norm(values(network, range(8)), axis=1)
    assert all(math.isclose(length, 1.0, abs_tol=1e-5) for length in lengths)
