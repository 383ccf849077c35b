"""gpt-oss from the start script to a receipt: its shape, its vocabulary and its format of chat.

The model is small, has seeded weights, experts in bfloat16, and says what a test has it say.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from proofserve.cli.servers import SMALL_MACHINE
from proofserve.protocol import SKETCH_2
from proofserve.protocol.nonces import fresh_seed
from proofserve.remote.node_client import NodeClient
from proofserve.reports import Progress
from proofserve.settings.process import environment, has_variable
from proofserve.verifier.chat.conversation import ReceiptClient
from proofserve.verifier.chat.statements import NodeFacts
from proofserve.verifier.chat.verification import ChatChecker
from proofserve.verifier.judges import Chances
from proofserve.verifier.validator import ValidatorSetup
from proofserve.wiring.launch import Server, ServerCommand, free_port, running_server
from proofserve_lab.orders import work_of_scheme
from support.gateway import gateway_process
from support.harmony import encoding, with_harmony
from support.models import SmallModels

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
MODEL = "openai/gpt-oss-20b"
OPTIONS = (
    *("--enable-poc", "--receipts", "--enforce-eager", "--max-model-len", "2048"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "openai"),
    *("--logits-processors", "soundness.scripted:Scripted"),
)
THINKS = "The user greets."
ANSWERS = "Good morning!"
ARGUMENTS = '{"city": "Oslo"}'
SPEAKS = (
    f"<|channel|>analysis<|message|>{THINKS}<|end|>"
    f"<|start|>assistant<|channel|>final<|message|>{ANSWERS}<|return|>"
)
CALLS = (
    f"<|channel|>analysis<|message|>{THINKS}<|end|><|start|>assistant<|channel|>commentary"
    f" to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def checkpoint(small_models: SmallModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / MODEL
    with_harmony(small_models.get("gpt_oss"), folder)
    return folder


@pytest.fixture(scope="module")
def vllm(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What the start script serves, where the hub's folder lies in the place of the hub."""
    folder = tmp_path_factory.mktemp("vllm")
    place = ("env", "-C", str(checkpoint.parents[1]), str(ROOT / "scripts" / "start_vllm_h100.sh"))
    path = f"{Path(sys.executable).parent}:{environment({})['PATH']}"
    usual = {name: text for name, text in SMALL_MACHINE.items() if not has_variable(name)}
    python = f"{ROOT / 'src'}:{ROOT}"
    own = {"PATH": path, "PYTHONPATH": python, "POC_OUTBOX": str(folder / "outbox.sqlite")}
    command = ServerCommand((*place, *OPTIONS), environment({**usual, **own}))
    with running_server(command, free_port(), folder / "server.log") as server:
        yield server


@pytest.fixture(scope="module")
def gateway(vllm: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gateway")
    with gateway_process(folder, environment({}), backend_url=vllm.url) as server:
        yield server


def request(script: str, **fields: Any) -> dict[str, Any]:
    ids = encoding().encode(script, allowed_special="all")
    return {
        "model": "gpt-oss-20b",
        "messages": [{"role": "user", "content": "Good morning."}],
        "temperature": 0.0,
        "vllm_xargs": {"script": ids},
        # The receipt says that something restricted the tokens, which the script did.
        "min_tokens": 1,
        **fields,
    }


def asked(server: Server, body: Mapping[str, Any]) -> Any:
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120.0)
    assert response.is_success, response.text
    return response.json()["choices"][0]


def test_both_names_are_served(gateway: Server) -> None:
    models = httpx.get(f"{gateway.url}/v1/models", timeout=30.0).json()["data"]
    assert [each["id"] for each in models] == [MODEL, "gpt-oss-20b"]


def test_reasoning_is_a_field_of_its_own(gateway: Server) -> None:
    choice = asked(gateway, request(SPEAKS))
    assert choice["message"]["content"] == ANSWERS
    assert choice["message"]["reasoning"] == THINKS
    assert choice["finish_reason"] == "stop"


def test_a_call_of_a_tool_is_a_field_of_its_own(gateway: Server) -> None:
    choice = asked(gateway, request(CALLS, tools=[WEATHER]))
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("get_weather", ARGUMENTS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"] == THINKS


def test_the_same_fields_come_in_a_stream(gateway: Server) -> None:
    body = request(CALLS, tools=[WEATHER], stream=True)
    found: dict[str, str] = {"reasoning": "", "arguments": ""}
    with httpx.stream(
        "POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=120.0
    ) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    for line in lines:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            found["reasoning"] += choice["delta"].get("reasoning") or ""
            for call in choice["delta"].get("tool_calls") or ():
                found["arguments"] += call["function"].get("arguments") or ""
    assert found == {"reasoning": THINKS, "arguments": ARGUMENTS}


@pytest.mark.parametrize(("script", "fields"), [(SPEAKS, {}), (CALLS, {"tools": [WEATHER]})])
def test_a_receipt_has_every_token_of_the_answer(
    script: str, fields: dict[str, Any], gateway: Server
) -> None:
    asks = request(script, **fields)
    with ReceiptClient(gateway.url) as client:
        chat = client.chat("an answer", asks)
    assert chat.choices[0].split
    assert chat.choices[0].token_ids == tuple(asks["vllm_xargs"]["script"])
    (receipt,) = chat.receipts
    assert receipt.receipt.output_tokens == len(asks["vllm_xargs"]["script"])


def test_the_receipt_of_reasoning_holds(gateway: Server, checkpoint: Path) -> None:
    """The prompt is the template's; with tools it is not, because this template has none."""
    with ReceiptClient(gateway.url) as client:
        chat = client.chat("an answer", request(SPEAKS))
    checker = ChatChecker(ValidatorSetup(checkpoint), None, fresh_seed())
    known, chances = NodeFacts(checker.weights_digest), Chances(1e-6, 1e-3)
    found = checker.outcome([chat], known, chances, Progress())
    assert (found.failures, found.gaps, found.answers) == ((), (), 1)


def test_it_proves_what_the_checkpoint_says(vllm: Server) -> None:
    with NodeClient(vllm.url) as node:
        work = work_of_scheme(SKETCH_2, "gpt-oss-20b", 32)
        assert len(node.artifacts(work, range(4))) == 4
