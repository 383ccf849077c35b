"""A checkpoint that is read layer by layer computes what the whole model does."""

import ctypes
import json
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma3Config, SiglipVisionConfig

from proofserve.engines import CheckpointError
from proofserve.engines.checkpoints import INDEX, CheckpointFiles
from proofserve.engines.reference import checkpoint
from proofserve.engines.reference.checkpoint import LayeredCheckpoint
from proofserve.engines.reference.engine import ReferenceEngine, Run
from proofserve.engines.reference.forward import logits_of, states
from proofserve.engines.reference.kernels import PROFILES, own_profile
from proofserve.engines.reference.network import Network, load, with_kernels
from proofserve.engines.reference.routing import ExpertMemory
from proofserve.engines.reference.suspects import suspect
from proofserve.engines.reference.variants import (
    first_tokens_only,
    last_tokens_only,
    with_int8_attention,
    with_redrawn_matrices,
    without_layers,
)
from proofserve.protocol.identity import Block
from proofserve.protocol.network_schemes import ArtifactScheme
from proofserve.protocol.scheme import Scheme
from proofserve.protocol.sketch import SketchScheme
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import Workload
from support.mixtures import MIXTURES, mixture, network_of, seeded, seeded_model
from support.pace import wait_until

QWEN = "Qwen3MoeTopKRouter"
SEQ_LEN = 24
NONCES = range(6)
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **MIXTURES,
    "qwen3": ("qwen3", {"head_dim": 16}),
    "llama": ("llama", {"head_dim": 16}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}),
}


def ids(count: int = 2) -> Tensor:
    drawn = torch.Generator().manual_seed(5)
    return torch.randint(3, 64, (count, SEQ_LEN), generator=drawn)


def embeddings() -> Tensor:
    return torch.randn(2, SEQ_LEN, 32, generator=torch.Generator().manual_seed(6))


# -- the whole model -------------------------------------------------------------------------------


@torch.inference_mode()
def is_that_of_transformers(folder: Path) -> None:
    """Last states of ids and of embeddings, and logits, are those of the whole model."""
    network = load(folder, "float32", "cpu")
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, read in (("input_ids", ids()), ("inputs_embeds", embeddings())):
        options = {name: read, "use_cache": False}
        found = states(network, read)
        assert torch.equal(found, whole.get_decoder()(**options).last_hidden_state), name
        assert torch.equal(logits_of(network, found), whole(**options).logits), name


def test_the_padding_token_may_be_the_last_one(tmp_path: Path) -> None:
    """gpt-oss has it beyond the ids of any text."""
    seeded_model("llama", head_dim=16, pad_token_id=63).save_pretrained(tmp_path)
    is_that_of_transformers(tmp_path)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model", MODELS)
def test_states_and_logits_are_those_of_the_whole_model(
    model: str, tied: bool, tmp_path: Path
) -> None:
    name, fields = MODELS[model]
    seeded_model(name, **{**fields, "tie_word_embeddings": tied}).save_pretrained(tmp_path)
    is_that_of_transformers(tmp_path)


def test_a_decoder_within_a_model_that_sees(tmp_path: Path) -> None:
    """Only the decoder is read; the tower of vision is beside it in the files."""
    name, fields = MODELS["gemma3"]
    text = seeded_model(name, **fields).config
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    vision = SiglipVisionConfig(**small, num_hidden_layers=1, image_size=28, patch_size=14)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    seeded(model)
    model.save_pretrained(tmp_path)
    is_that_of_transformers(tmp_path)


# -- several runs together -------------------------------------------------------------------------


def variants(network: Network) -> Mapping[str, Network]:
    return {
        "published": network,
        **{name: suspect(network, name) for name in ("int4 g128", "W8A8 int8", "KV cache in fp8")},
        "our own rounding": with_kernels(network, own_profile(torch.bfloat16)),
        **{name: with_kernels(network, PROFILES[name]) for name in ("TF32", "norms")},
        "served int8": with_kernels(suspect(network, "int8 g32"), PROFILES["torch on 4 ranks"]),
        "without a layer": without_layers(network, [0]),
        "first tokens": first_tokens_only(network, 8),
        "last tokens": with_kernels(last_tokens_only(network, 8), PROFILES["float32"]),
        "attention in int8": with_int8_attention(network),
        "redrawn": with_redrawn_matrices(network),
    }


def runs_of(network: Network) -> list[Run]:
    """Each variant, with nonces of its own. Suspects without roundings hold published experts."""
    memory, runs = ExpertMemory(network), []
    for place, (name, variant) in enumerate(variants(network).items()):
        experts = memory.recording() if name == "published" else None
        if name in {"int4 g128", "W8A8 int8", "KV cache in fp8"}:
            experts = memory.holding(variant)
        runs.append(Run(variant, NONCES[place % 3 :] if place else NONCES, experts))
    return runs


@pytest.mark.parametrize(
    "scheme",
    [
        ArtifactScheme(),
        ArtifactScheme(layer_reflections=True),
        SketchScheme(),
        SketchScheme(seeded_experts=True),
    ],
    ids=["artifact", "reflected", "sketch", "seeded experts"],
)
@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_several_runs_together_give_the_vectors_of_each_alone(model: str, scheme: Scheme) -> None:
    network = mixture(QWEN) if model == "mixture" else network_of("qwen3", head_dim=16)
    work = Workload(scheme, Block("0xabc", 7), "node-key", SEQ_LEN)
    together = ReferenceEngine(4).compute_all(work, runs_of(network))
    # One after the other: the first of them records what others hold.
    for name, run, batch in zip(variants(network), runs_of(network), together, strict=True):
        (alone,) = ReferenceEngine(4).compute_all(work, [run])
        assert batch.nonces == alone.nonces == tuple(run.nonces)
        assert np.array_equal(batch.values, alone.values), name


# -- what is in memory -----------------------------------------------------------------------------


class Reads:
    """Which layers were read from disk, and how many were in memory just before."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.layers: list[int] = []
        self.alive: list[int] = []
        self._weights: list[ReferenceType[nn.Parameter]] = []
        real = LayeredCheckpoint._filled_layer

        def filled(of: LayeredCheckpoint, index: int) -> nn.Module:
            self.alive.append(sum(each() is not None for each in self._weights))
            self.layers.append(index)
            layer = real(of, index)
            self._weights += [ref(weight) for weight in layer.parameters()]
            return layer

        patch.setattr(LayeredCheckpoint, "_filled_layer", filled)


@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_of_a_large_checkpoint_one_layer_is_in_memory_and_read_once_for_all_runs(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, fields = MODELS[QWEN if model == "mixture" else "qwen3"]
    seeded_model(name, **{**fields, "num_hidden_layers": 3}).save_pretrained(tmp_path)
    work = Workload(ArtifactScheme(), Block("0xabc", 7), "node-key", SEQ_LEN)
    reads = Reads(monkeypatch)
    small = load(tmp_path, "float32", "cpu")
    expected = ReferenceEngine(4).compute_all(work, runs_of(small))
    again = ReferenceEngine(4).compute_all(work, runs_of(small))
    # A small one stays in memory.
    assert reads.layers == [0, 1, 2]
    monkeypatch.setattr(checkpoint, "KEPT", 0)
    reads.layers.clear()
    reads.alive.clear()
    large = load(tmp_path, "float32", "cpu")
    kept = len(reads._weights)
    made = ReferenceEngine(4).compute_all(work, runs_of(large))
    assert reads.layers == [0, 1, 2]
    assert reads.alive == [kept] * 3
    for one, other, third in zip(expected, made, again, strict=True):
        assert np.array_equal(one.values, other.values)
        assert np.array_equal(one.values, third.values)
    # The last layer is kept, in case the next forward has only one.
    assert large.checkpoint.layer(2) is large.checkpoint.layer(2)
    assert reads.layers == [0, 1, 2]


def cached(file: Path, names: str) -> float:
    """Which part of the tensors with ``names`` in their own the system has in memory."""
    size = file.stat().st_size
    found = (ctypes.c_ubyte * (size // mmap.PAGESIZE + 1))()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as held:
        start = (ctypes.c_char * 0).from_buffer(held)
        place = ctypes.c_void_p(ctypes.addressof(start))
        assert ctypes.CDLL(None).mincore(place, ctypes.c_size_t(size), found) == 0
        del start
    places = CheckpointFiles(file.parent).places.items()
    ranges = (where for name, (_, where) in places if names in name)
    pages = {byte // mmap.PAGESIZE for where in ranges for byte in where[:: mmap.PAGESIZE]}
    return sum(found[number] & 1 for number in pages) / len(pages)


def test_the_system_reads_the_next_layer_while_one_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, fields = MODELS["qwen3"]
    # Layers of 50 MB: the system reads some megabytes behind each byte that is asked for.
    wide = {**fields, "num_hidden_layers": 3, "intermediate_size": 2**17}
    seeded_model(name, **wide).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(file, "layers.1.mlp"):
        pytest.skip("the file system keeps all its files in memory")
    monkeypatch.setattr(checkpoint, "KEPT", 0)
    LayeredCheckpoint(tmp_path, torch.device("cpu"), torch.float32).layer(0)
    wait_until(lambda: cached(file, "layers.1.mlp") == 1)
    assert cached(file, "layers.2.mlp") < 0.5


# -- broken folders --------------------------------------------------------------------------------


SHARDS = "model-*.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dense model of two layers, in several shards."""
    name, fields = MODELS["qwen3"]
    return sharded(tmp_path, name, fields)


def sharded(folder: Path, name: str, fields: Mapping[str, Any]) -> Path:
    seeded_model(name, **fields).save_pretrained(folder, max_shard_size="20KB")
    assert len([*folder.glob(SHARDS)]) > 2
    assert (folder / INDEX).is_file()
    return folder


def rewritten(folder: Path, change: Callable[[str, Tensor], Tensor | None]) -> None:
    """``change`` gives the tensor that takes the place of another, None for none."""
    for file in folder.glob(SHARDS):
        found = {name: change(name, each) for name, each in load_file(file).items()}
        left = {name: each for name, each in found.items() if each is not None}
        save_file(left, file, {"format": "pt"})


def without(folder: Path, name: str) -> None:
    seen = []

    def drop(stored: str, values: Tensor) -> Tensor | None:
        seen.append(stored)
        return None if stored == name else values

    rewritten(folder, drop)
    assert name in seen


def compute(folder: Path) -> Tensor:
    network = load(folder, "float32", "cpu")
    found = states(network, ids())
    logits_of(network, found)
    return found


def test_a_shard_of_the_index_that_is_missing_is_named(folder: Path) -> None:
    shard = sorted(folder.glob(SHARDS))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} of the index is missing"):
        load(folder, "float32", "cpu")


@pytest.mark.parametrize("left", [0, 4, 100, -10])
def test_a_shard_that_was_cut_is_named(folder: Path, left: int) -> None:
    shard = sorted(folder.glob(SHARDS))[1]
    shard.write_bytes(shard.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=shard.name):
        load(folder, "float32", "cpu")


def test_an_index_that_cannot_be_read_is_an_error(folder: Path) -> None:
    (folder / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(folder, "float32", "cpu")


def test_a_tensor_in_two_files_is_named(folder: Path) -> None:
    (folder / INDEX).unlink()
    norm = {"model.norm.weight": torch.ones(32)}
    save_file(norm, folder / "another.safetensors", {"format": "pt"})
    both = r"another\.safetensors and model-.*\.safetensors both hold model\.norm\.weight"
    with pytest.raises(CheckpointError, match=both):
        load(folder, "float32", "cpu")


def test_a_tensor_of_another_shape_than_the_configuration_says_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(
        CheckpointError, match=r"mlp\.\w+_proj\.weight is \[32, 32\], the configuration says"
    ):
        compute(folder)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.layers.1.self_attn.q_proj.weight", r"layer 1 has no self_attn\.q_proj\.weight"),
        ("model.layers.0.input_layernorm.weight", r"layer 0 has no input_layernorm\.weight"),
        ("model.norm.weight", r"the decoder has no norm\.weight"),
        ("model.embed_tokens.weight", "no embeddings of tokens"),
        ("lm_head.weight", "the head has no weight"),
    ],
)
def test_a_tensor_that_is_missing_is_named(folder: Path, name: str, said: str) -> None:
    without(folder, name)
    with pytest.raises(CheckpointError, match=said):
        compute(folder)
    work = Workload(ArtifactScheme(), Block("0xabc", 7), "node-key", SEQ_LEN)
    if "layer" in name:
        with pytest.raises(EngineFault, match=said):
            ReferenceEngine(4).compute(work, load(folder, "float32", "cpu"), [0])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mlp.gate.e_score_correction_bias", r"layer 1 has no mlp\.gate\.e_score_correction_bias"),
        ("mlp.gate.weight", r"layer 1 has no mlp\.gate\.weight"),
        # Experts are stacked, and the stack is too short.
        ("mlp.experts.3.up_proj.weight", r"layers\.1\.mlp\.experts\.gate_up_proj"),
        ("mlp.experts.3.down_proj.weight", r"layers\.1\.mlp\.experts\.down_proj"),
    ],
)
def test_what_a_mixture_lacks_is_named(tmp_path: Path, name: str, said: str) -> None:
    folder = sharded(tmp_path, *MODELS["DeepseekV3TopkRouter"])
    without(folder, f"model.layers.1.{name}")
    with pytest.raises(CheckpointError, match=said):
        compute(folder)


def test_tensors_that_the_network_does_not_use_are_ignored(folder: Path) -> None:
    before = compute(folder)
    (folder / INDEX).unlink()
    extra = (
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.2.eh_proj.weight",
        "mtp.layers.0.mlp.up_proj.weight",
        "vision_tower.encoder.layers.0.mlp.fc1.weight",
        "visual.patch_embed.proj.weight",
    )
    tensors = {name: torch.full((32, 32), torch.nan) for name in extra}
    save_file(tensors, folder / "another.safetensors", {"format": "pt"})
    assert torch.equal(compute(folder), before)
