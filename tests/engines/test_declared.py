"""What quantised checkpoints declare beside their weights, and which suspects are cheaper."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from proofserve.engines import CheckpointError
from proofserve.engines.reference.forward import states
from proofserve.engines.reference.kernels import PROFILES
from proofserve.engines.reference.network import load, weights_alone, with_kernels
from proofserve.engines.reference.rounding import Rounding, fp8, fp8_unscaled, in_groups, integers
from proofserve.engines.reference.suspects import FP8_CACHE, SUSPECTS, suspects_of
from proofserve.engines.reference.variants import with_activations, with_cache
from proofserve.protocol.identity import Block
from proofserve.protocol.network_schemes import ArtifactScheme
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.records import vectors_of
from proofserve.reports import Progress, ReportedError
from proofserve.rounds.records import Workload
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judges import OWN, BankRun
from proofserve.verifier.judging import JudgingOptions, judged, judges_of
from proofserve.verifier.validator import IN_FULL, CheckpointValidator, ValidatorSetup, proofs_of
from proofserve.verifier.verification import CERTAIN, claims_of_vectors
from support.library_node import FP8_PER_TOKEN, LibraryNode
from support.quantised import (
    BLOCKS,
    FP8,
    GROUPS,
    TOKEN,
    Settings,
    Store,
    Written,
    compressed,
    compressed_settings,
    fp8_in_blocks,
    fp8_whole,
    packed,
    rewrite_tensors,
    write,
    write_as,
)

READ: Final = torch.arange(24).view(2, 12)
WORK: Final = Workload(ArtifactScheme(), Block("0xabc", 7), "node", 16)


def by_powers(values: Tensor) -> Tensor:
    """fp8 with the least power of two as a scale by which the largest value fits."""
    scale = 2.0 ** (values.abs().amax(-1, keepdim=True).double() / 448).log2().ceil()
    return fp8_unscaled(values / scale.float()) * scale.float()


W8A8: Final = {"num_bits": 8, "type": "int", "strategy": "channel"}
DECLARED: Final[dict[str, tuple[Settings, Store, Rounding, str]]] = {
    "int8 per token": (
        compressed_settings("int-quantized", W8A8, {**TOKEN, "type": "int"}),
        compressed("int-quantized", W8A8, torch.float32),
        integers(8),
        "int8 per token",
    ),
    "fp8 per token": (
        {**FP8, "activation_scheme": "dynamic"},
        fp8_whole(per_channel=True),
        fp8,
        "fp8 per token",
    ),
    "fp8 in groups": (
        {**BLOCKS, "activation_scheme": "dynamic"},
        fp8_in_blocks(128),
        in_groups(fp8, 128),
        "fp8 per group of 128",
    ),
    "fp8 by powers": (
        {**BLOCKS, "activation_scheme": "dynamic", "scale_fmt": "ue8m0"},
        fp8_in_blocks(128),
        in_groups(by_powers, 128),
        "fp8 per group of 128 with powers of two as scales",
    ),
    "fp8 with a scale": (
        {**FP8, "activation_scheme": "static"},
        fp8_whole(per_channel=False, inputs=0.01),
        lambda values: (values / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.01,
        "fp8 with a stored scale",
    ),
}


@pytest.mark.parametrize("name", DECLARED)
def test_what_matrices_multiply_is_rounded_as_declared(name: str, tmp_path: Path) -> None:
    settings, store, rounding, text = DECLARED[name]
    written = write("qwen3", tmp_path, settings, store)
    declared, plain = (load(each, "float32", "cpu") for each in (written.folder, written.plain))
    found = states(declared, READ)
    assert torch.equal(found, states(with_activations(plain, rounding), READ))
    assert not torch.equal(found, states(plain, READ))
    matrices = declared.checkpoint.published.matrices.values()
    assert [(m.bits, m.inputs and m.inputs.text) for m in matrices] == [(8, text)] * 14
    assert torch.equal(states(weights_alone(declared), READ), states(plain, READ))
    # As an honest server computes it.
    assert not torch.equal(found, states(with_kernels(declared, PROFILES["torch"]), READ))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_what_experts_multiply_is_rounded_as_declared(family: str, tmp_path: Path) -> None:
    """The experts' own code, written as transformers does it, with a rounding before products."""
    written = write(family, tmp_path, DECLARED["fp8 per token"][0], fp8_whole(per_channel=True))
    found = states(load(written.folder, "float32", "cpu"), READ)

    def rounded(_index: int, layer: nn.Module) -> nn.Module:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda _, args: (fp8(args[0]),))
            elif type(module).__name__.endswith("Experts"):
                module.forward = partial(one_by_one, module)  # type: ignore[assignment]
        return layer

    plain = load(written.plain, "float32", "cpu")
    expected = states(plain.changed(rounded), READ)
    # Sums in another order end beside another number of fp8 now and then.
    moved = (states(plain, READ) - expected).norm()
    assert (found - expected).norm() < 0.05 * moved


def one_by_one(experts: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    in_gpt_oss = hasattr(experts, "alpha")
    made = torch.zeros_like(hidden)
    for token, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
        for expert, share in zip(chosen.tolist(), shares, strict=True):
            up, down = experts.gate_up_proj[expert], experts.down_proj[expert]
            if in_gpt_oss:
                both = fp8(hidden[token : token + 1]) @ up + experts.gate_up_proj_bias[expert]
                out = fp8(experts._apply_gate(both)) @ down + experts.down_proj_bias[expert]
            else:
                gate, linear = (fp8(hidden[token : token + 1]) @ up.T).chunk(2, dim=-1)
                out = fp8(functional.silu(gate) * linear) @ down.T
            made[token] += share * out[0]
    return made


def test_experts_of_a_kernel_that_does_it_all_are_refused(tmp_path: Path) -> None:
    written = write("qwen3_moe", tmp_path, *DECLARED["fp8 per token"][:2])
    network = load(written.folder, "float32", "cpu")

    def fused(_index: int, layer: nn.Module) -> nn.Module:
        layer.mlp.experts.forward = lambda hidden, *_: hidden
        return layer

    first = replace(network, changes=(fused, *network.changes))
    with pytest.raises(CheckpointError, match="what experts multiply cannot be rounded"):
        states(first, READ)


def with_declared_cache(folder: Path) -> Written:
    settings, store = packed(4, **GROUPS)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    settings = {**settings, "kv_cache_scheme": {**scheme, "dynamic": False}}
    return write("qwen3", folder, settings, store)


def test_a_cache_in_fp8_is_rounded_by_its_scales(tmp_path: Path) -> None:
    written = with_declared_cache(tmp_path)
    scales = {"0.self_attn.k_scale": 0.02, "0.self_attn.v_proj.output_scale": 0.03}
    rewrite_tensors(
        written.folder,
        lambda of: of.update({f"model.layers.{n}": torch.tensor(s) for n, s in scales.items()}),
    )
    network, plain = (load(each, "float32", "cpu") for each in (written.folder, written.plain))

    def cache(layer: int) -> tuple[Rounding, Rounding]:
        return (scaled(0.02), scaled(0.03)) if layer == 0 else (fp8_unscaled, fp8_unscaled)

    found = states(network, READ)
    assert torch.equal(found, states(replace(plain, cache=cache), READ))
    assert not torch.equal(found, states(with_cache(plain, fp8_unscaled), READ))
    assert torch.equal(states(weights_alone(network), READ), states(plain, READ))
    assert network.checkpoint.published.cache is not None
    assert FP8_CACHE not in suspects_of(network)


def test_a_declared_cache_clears_nobody_because_it_hides_lies(tmp_path: Path) -> None:
    """What it rounds away is alike in all kernels: rotated int8 kept 0.79 of it in five layers."""
    wide = replace(WORK, scheme=ArtifactScheme(64))
    setup, nonces = ValidatorSetup(with_declared_cache(tmp_path).folder), tuple(range(32))
    validator = CheckpointValidator(setup, proofs_of(wide, 4))
    assert validator.hides_lies
    assert all(IN_FULL in each for each in validator.references)
    served = "vLLM on x86 with bfloat16"
    for kernel, verdict in ((served, None), (f"{served} {IN_FULL}", SequentialResult.HONEST)):
        node = validator.vectors(BankRun(kernels=kernel, order=7), nonces)
        claims = tuple(claims_of_vectors(node))
        claimed = ClaimedArtifacts("block", "key", nonces, claims)
        truth = validator.as_truth(wide.scheme.width, 4)
        found = judged(claimed, truth, JudgingOptions(), "seed", None, Progress()).outcome.verdict
        assert found is verdict or (verdict is None and found not in CERTAIN), (kernel, found)


def scaled(scale: float) -> Rounding:
    return lambda values: fp8_unscaled(values / scale) * scale


# -- suspects --------------------------------------------------------------------------------------


def test_suspects_are_cheaper_than_published(tmp_path: Path) -> None:
    eight, four = (write_as(n, tmp_path / n) for n in ("fp8 in blocks", "int4 in groups"))
    of_fp8 = suspects_of(load(eight.folder, "float32", "cpu"))
    assert {each.split()[0] for each in of_fp8} == {"int6", "int4", "nf4", "mxfp4", "nvfp4", "KV"}
    assert suspects_of(load(four.folder, "float32", "cpu")) == (FP8_CACHE,)
    # Served in bfloat16 it is what was published.
    assert suspects_of(load(eight.plain, "float32", "cpu")) == SUSPECTS


def validator_of(folder: Path, **setup: Any) -> CheckpointValidator:
    return CheckpointValidator(ValidatorSetup(folder, **setup), proofs_of(WORK, 4))


def test_a_validator_compares_with_the_weights_alone(tmp_path: Path) -> None:
    """Servers that round activations and those that do not are both honest."""
    written = write("qwen3", tmp_path, *DECLARED["int8 per token"][:2])
    validator, plain = validator_of(written.folder), validator_of(written.plain)
    truth, of_plain = validator.truth(range(4)), plain.truth(range(4))
    assert all(np.array_equal(truth[n], of_plain[n]) for n in range(4))
    full = validator.vectors(BankRun(kernels=f"{OWN.kernels} {IN_FULL}"), range(4))
    own = validator.errors(OWN, range(4))
    unrounded = plain.errors(OWN, range(4))
    for nonce in range(4):
        error = np.linalg.norm(full[nonce] - truth[nonce])
        assert error < 1.1 * np.linalg.norm(unrounded[nonce]) + 1e-3
        assert np.linalg.norm(own[nonce]) > 1.2 * error
    assert not any(IN_FULL in each for each in plain.kernels)


def test_a_server_of_other_code_errs_as_our_own_run(tmp_path: Path) -> None:
    """Roundings of activations explain most of its errors, and ours are alike in size."""
    written = write("qwen3", tmp_path, *DECLARED["fp8 per token"][:2])
    nonces = range(16)
    validator = validator_of(written.folder)
    node = LibraryNode(written.folder, written.plain, FP8_PER_TOKEN)
    sent = vectors_of(node.claims(WORK, nonces, 4), WORK.scheme.width)
    truth, own = validator.truth(nonces), validator.errors(OWN, nonces)
    full = validator.errors(BankRun(kernels=f"{OWN.kernels} {IN_FULL}"), nonces)
    size, ours, unrounded = (
        np.median([np.linalg.norm(each[n]) for n in nonces])
        for each in ({n: sent[n] - truth[n] for n in nonces}, own, full)
    )
    assert 0.7 < size / ours < 1.4
    assert size > 1.2 * unrounded


def test_a_validator_without_suspects_says_so(tmp_path: Path) -> None:
    four = write_as("int4 in groups", tmp_path).folder
    validator = validator_of(four, kv_dtype="fp8")
    assert validator.names == ()
    options = JudgingOptions(tests=("direction",))
    with pytest.raises(ReportedError, match="--test direction: there are no suspects"):
        judges_of(options, 10, validator.as_truth(128, 8))
