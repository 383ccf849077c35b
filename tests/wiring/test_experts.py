"""Which kernel for experts a server asks for, by its model, its card and its options."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from proofserve.cli import serve
from proofserve.wiring import experts
from proofserve.wiring.experts import asked_experts
from proofserve.wiring.launch import free_port

GPT_OSS = {"num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4"}}
PACKED = {"weights": {"type": "int", "num_bits": 4}}


def model(folder: Path, config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def quantised(**settings: Any) -> dict[str, Any]:
    return {"text_config": {"n_routed_experts": 8}, "quantization_config": settings}


@pytest.mark.parametrize(
    ("config", "card", "asked"),
    [
        (GPT_OSS, "8.0", ()),
        (GPT_OSS, "9.0", ("--moe-backend", "marlin")),
        (GPT_OSS, "10.3", ("--moe-backend", "marlin")),
        (GPT_OSS, "12.0", ()),
        ({"num_experts": 8}, "9.0", ()),
        ({"num_experts": 8}, "10.0", ("--moe-backend", "triton")),
        ({"num_experts": None}, "10.0", ()),
        (quantised(quant_method="fp8"), "10.0", ("--moe-backend", "triton")),
        (quantised(quant_method="gptq", bits=4), "10.0", ("--moe-backend", "marlin")),
        (quantised(quant_method="gptq", bits=8), "10.0", ()),
        (
            quantised(quant_method="compressed-tensors", config_groups={"group_0": PACKED}),
            "10.0",
            ("--moe-backend", "marlin"),
        ),
        (quantised(quant_method="modelopt"), "10.0", ()),
    ],
)
def test_what_is_asked(config: Any, card: str, asked: tuple[str, ...], tmp_path: Path) -> None:
    assert asked_experts(model(tmp_path, config), [], None, card).options == asked


def test_what_is_left_to_vllm_and_to_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(tmp_path, GPT_OSS)

    def why(*options: str, scheme: str = "") -> str:
        asked = asked_experts(folder, options, scheme, "9.0")
        assert asked.options == ()
        return asked.why

    assert why(scheme="artifact-v1") == "artifact-v1 leaves the experts to the model"
    for given in ("--moe-backend=auto", "--moe_backend=triton", "--kernel-config={}"):
        assert "operator" in why(given)
    assert "does not know this format" in why("--quantization", "fp8")
    assert "no config.json" in asked_experts("nobody/nothing", [], None, "9.0").why
    monkeypatch.setattr(experts, "card_capability", lambda: None)
    assert asked_experts(folder, [], None).why == "no card is here"
    with pytest.raises(ValueError, match=r"'H100' is no capability"):
        asked_experts(folder, [], None, "H100")


def test_a_check_says_what_a_card_would_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = ("--poc-outbox", str(tmp_path / "outbox.sqlite"))
    server = ("--enable-poc", "--host", "127.0.0.1", "--port", str(free_port()), *outbox)
    words = [model(tmp_path, GPT_OSS), *server, "--capability", "9.0"]
    # Those that import vLLM.
    monkeypatch.setattr(serve, "slow_checks", lambda *_: {})
    said = CliRunner().invoke(serve.app, [*words, "--check-config"])
    assert said.exit_code == 0, said.output
    assert "experts: --moe-backend marlin: vLLM's own choice for mxfp4 on a card" in said.output
    wrong = CliRunner().invoke(serve.app, [*words[:-1], "H100", "--check-config"])
    assert wrong.exit_code == 2
    assert "experts: FAILED: 'H100' is no capability of a card" in wrong.output
    assert "--capability is for --check-config" in CliRunner().invoke(serve.app, words).output
