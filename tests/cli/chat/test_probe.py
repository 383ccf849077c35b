"""``proofserve probe`` against endpoints that know nothing of us, honest and not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.cli.model import SmallModel, checkpoint
from proofserve.engines.reference.suspects import suspect
from proofserve.remote import http
from support.four_bits import one_thread
from support.models import SmallModels
from support.odd_server import odd_server
from verifier.stub_endpoint import Manners, StubEndpoint, Writer, stub_endpoint


@pytest.fixture(scope="module", autouse=True)
def few_threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def trained() -> Path:
    return checkpoint(SmallModel("trained"))


@pytest.fixture(scope="module")
def honest(trained: Path) -> Writer:
    return Writer(trained)


def run(url: str, model: Path, *args: object) -> Result:
    argv = ["probe", url, "--model", str(model), "--seed", "7", *map(str, args)]
    return CliRunner().invoke(app, argv)


def record(folder: Path, url: str, model: Path, *args: object) -> tuple[int, dict[str, Any]]:
    file = folder / "probe.json"
    found = run(url, model, "--json", file, *args)
    assert file.exists(), found.output
    return found.exit_code, json.loads(file.read_text())


def test_an_honest_endpoint_is_cleared_with_few_prompts(
    honest: Writer, trained: Path, tmp_path: Path
) -> None:
    page = tmp_path / "probe.html"
    with stub_endpoint(honest) as (stub, url):
        code, found = record(tmp_path, url, trained, "--html", page, "--prompts", 24)
    assert (code, found["label"], found["suspect"]) == (0, "honest", None)
    assert found["prompts_asked"] <= 16
    assert 0.7 < found["error_over_own_rounding"] < 1.4
    assert {each["ids_from"] for each in found["prompts"]} == {"token ids"}
    assert {(each["kind"], each["greedy"]) for each in found["prompts"]} == {
        (kind, greedy) for kind in ("chat", "completion") for greedy in (True, False)
    }
    assert all(body["top_p"] == 1.0 and body["top_k"] == -1 for body in stub.bodies)
    assert {body["temperature"] for body in stub.bodies} == {0.0, 1.0}
    text = page.read_text()
    assert text.count("<svg") >= 3
    assert found["prompts"][0]["prompt"].split()[0] in text


def test_the_cost_is_told_before_the_first_prompt(honest: Writer, trained: Path) -> None:
    with stub_endpoint(honest) as (stub, url):
        said = run(url, trained, "--prompts", 4, "--max-tokens", 16).output
    assert "At most 4 prompts:" in said
    assert "64 of answers" in said
    assert said.index("At most 4 prompts") < said.index("asking prompts 1 to 4")
    assert len(stub.bodies) == 4


# Those that show most clearly are rare here: test_checker.py and the demo name them too.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("int4 g128", marks=pytest.mark.slow),
        pytest.param("fp8 per channel", marks=pytest.mark.slow),
        "int8 per channel",
    ],
)
@pytest.mark.usefixtures("few_kernels")
def test_rounded_weights_are_convicted_and_named(name: str, trained: Path, tmp_path: Path) -> None:
    cheat = Writer(trained, lambda network: suspect(network, name))
    with stub_endpoint(cheat) as (_, url):
        code, found = record(tmp_path, url, trained, "--prompts", 32)
    assert (code, found["label"], found["suspect"]) == (1, "quantised", name)
    assert found["prompts_asked"] <= 16


@pytest.mark.usefixtures("few_kernels")
def test_another_checkpoint_is_another_model(small_models: SmallModels, tmp_path: Path) -> None:
    other = Writer(small_models.get("qwen3", seed=1))
    with stub_endpoint(other) as (_, url):
        model = small_models.get("qwen3")
        code, found = record(tmp_path, url, model)
        assert (code, found["label"]) == (1, "another model")
        assert found["prompts_asked"] == 4
        code, found = record(tmp_path, url, model, "--no-logprobs")
        assert (code, found["label"]) == (1, "another model")
        assert found["prompts_asked"] == 4


@pytest.mark.usefixtures("few_kernels")
def test_without_log_probabilities_four_bits_show_and_honest_ones_take_long(
    small_models: SmallModels, tmp_path: Path
) -> None:
    model = small_models.get("qwen3")
    honest = Writer(model)
    cheat = Writer(model, lambda network: suspect(network, "int4 g128"))
    with stub_endpoint(cheat, Manners(most_logs=0)) as (_, url):
        code, found = record(tmp_path, url, model, "--prompts", 16)
    assert (code, found["label"], found["suspect"]) == (1, "quantised", "int4 g128")
    assert any("gives no log-probabilities" in note for note in found["notes"])
    with stub_endpoint(honest, Manners(most_logs=0)) as (_, url):
        code, found = record(tmp_path, url, model, "--prompts", 4)
    assert (code, found["label"]) == (2, "cannot tell")
    assert "more prompts" in found["text"]
    assert found["greedy_share_beyond"] == 0.0


@pytest.mark.usefixtures("few_kernels")
def test_a_strict_endpoint_with_five_log_probabilities(
    honest: Writer, trained: Path, tmp_path: Path
) -> None:
    manners = Manners(most_logs=5, strict=True)
    with stub_endpoint(honest, manners) as (stub, url):
        code, found = record(tmp_path, url + "/v1", trained, "--prompts", 80)
    assert (code, found["label"]) == (0, "honest")
    assert "log-probabilities" in {each["ids_from"] for each in found["prompts"]}
    # 20 with and without our fields, 5 with them: those that were refused, once for each route.
    assert sum(body.get("top_logprobs", body.get("logprobs")) == 20 for body in stub.bodies) == 4
    assert any("refuses top_k" in note for note in found["notes"])


@pytest.mark.usefixtures("few_kernels")
def test_only_text(honest: Writer, trained: Path, tmp_path: Path) -> None:
    """Ids by the tokenizer; answers in other tokens than its own are left out, and counted."""
    manners = Manners(most_logs=0, strict=True)
    with stub_endpoint(honest, manners) as (_, url):
        code, found = record(tmp_path, url, trained, "--prompts", 8)
    assert code == 2
    judged = [each for each in found["prompts"] if each["left_out"] is None]
    assert {each["ids_from"] for each in judged} == {"the text"}
    assert found["label"] == "cannot tell"
    assert found["greedy_share_beyond"] == 0.0


@pytest.mark.usefixtures("few_kernels")
def test_a_checkpoint_under_suspicion(trained: Path, tmp_path: Path) -> None:
    """An honest endpoint is not taken for a suspect that does the same as the published one."""
    with stub_endpoint(Writer(trained)) as (_, url):
        code, found = record(tmp_path, url, trained, "--suspect", trained)
    assert code == 0
    assert found["suspects_not_seen"] == [trained.name]


def _with_nan(body: dict[str, Any]) -> bytes:
    choice = body["choices"][0]
    if "message" in choice:
        choice["logprobs"]["content"][0]["logprob"] = float("nan")
    else:
        choice["logprobs"]["token_logprobs"][0] = float("nan")
    return json.dumps(body).encode()


def _shifted(body: dict[str, Any]) -> bytes:
    """Log-probabilities of another answer."""
    body["choices"][0]["token_ids"] = [each + 1 for each in body["choices"][0]["token_ids"]]
    return json.dumps(body).encode()


def _unknown_ids(body: dict[str, Any]) -> bytes:
    body["choices"][0]["token_ids"] = [1_000_000] * len(body["choices"][0]["token_ids"])
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("manners", "said"),
    [
        (Manners(more_prompt=3), "it has another tokenizer or template"),
        (Manners(spoil=lambda _: b"{not json"), "the answer cannot be read"),
        (Manners(spoil=lambda _: b'{"choices": []}'), "choices: 0 where 1 was asked for"),
        (Manners(spoil=_with_nan), "the answer cannot be read"),
        (Manners(spoil=_shifted), "of other tokens than the answer"),
        (Manners(spoil=_unknown_ids), "such as the checkpoint has not"),
    ],
)
def test_a_fault_is_never_an_honest_verdict(
    manners: Manners, said: str, honest: Writer, trained: Path, tmp_path: Path
) -> None:
    manners.ids = manners.more_prompt == 0
    with stub_endpoint(honest, manners) as (_, url):
        code, found = record(tmp_path, url, trained, "--prompts", 4, "--max-tokens", 8)
    assert (code, found["label"]) == (2, "cannot tell")
    assert all(said in str(each["left_out"]) for each in found["prompts"])
    assert "no answer can be judged" in found["text"]


@pytest.mark.usefixtures("few_kernels")
def test_most_answers_spoilt_clear_nobody(honest: Writer, trained: Path, tmp_path: Path) -> None:
    """An endpoint may spoil those answers that would convict it."""
    numbers = iter(range(10_000))

    def spoil(body: dict[str, Any]) -> bytes | None:
        return None if next(numbers) % 3 == 0 else b"{}"

    with stub_endpoint(honest, Manners(spoil=spoil)) as (_, url):
        code, found = record(tmp_path, url, trained, "--prompts", 24)
    assert (code, found["text"]) == (2, "cannot tell, too many answers had to be left out")


def refused(url: str, model: Path, *args: object) -> str:
    found = run(url, model, *args)
    assert found.exit_code == 3, found.output
    return found.output


def test_errors_that_end_a_probe_name_what_to_do(honest: Writer, trained: Path) -> None:
    with stub_endpoint(honest, Manners(key="secret")) as (_, url):
        assert "give --api-key" in refused(url, trained)
        assert "bad key" in refused(url, trained, "--api-key", "other")
        assert run(url, trained, "--api-key", "secret", "--prompts", 1).exit_code == 2
    with stub_endpoint(honest, Manners(status=404)) as (_, url):
        said = refused(url, trained)
        assert "refuses /chat/completions: 404" in said
        assert "refuses /completions: 404" in said
    with stub_endpoint(honest) as (_, url):
        assert "the endpoint has stub, second" in refused(url, trained, "--served-model", "x")
        assert "nothing is left to ask" in refused(url, trained, "--no-chat", "--no-completions")
        assert "--served-dtype" in refused(url, trained, "--served-dtype", "float32")
        assert "no checkpoint" in refused(url, trained / "nothing")


@pytest.mark.usefixtures("few_kernels")
def test_a_route_that_is_missing_is_not_asked_again(
    honest: Writer, trained: Path, tmp_path: Path
) -> None:
    with stub_endpoint(honest, Manners(chat=False)) as (stub, url):
        code, found = record(tmp_path, url, trained, "--prompts", 80)
    assert (code, found["label"]) == (0, "honest")
    assert any("refuses /chat/completions: 400" in note for note in found["notes"])
    assert all("prompt" in body for body in stub.bodies)


def gaps(stub: StubEndpoint) -> list[float]:
    return [after - before for before, after in zip(stub.at, stub.at[1:], strict=False)]


def test_a_rate_limit_is_respected(honest: Writer, trained: Path) -> None:
    with stub_endpoint(honest, Manners(busy=["2", "0"])) as (stub, url):
        found = run(url, trained, "--prompts", 4, "--max-tokens", 4)
    assert found.exit_code == 2
    assert "waiting 2 s, as the endpoint asks" in found.output
    assert len(stub.bodies) == 6
    assert gaps(stub)[0] >= 2.0


def test_a_wait_that_is_too_long_ends_the_probe(honest: Writer, trained: Path) -> None:
    with stub_endpoint(honest, Manners(busy=["3600"])) as (stub, url):
        assert "asks to wait 3600 s" in refused(url, trained)
    assert len(stub.bodies) == 1


@pytest.mark.parametrize(
    ("body", "endless", "why"),
    [(b"[" * 10**5, False, "lists no models"), (b" " * 2**20, True, "more than 1048576 bytes")],
)
def test_a_hostile_endpoint_is_an_error(
    body: bytes, endless: bool, why: str, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "LONGEST_ANSWER", 2**20)
    with odd_server(body, endless) as url:
        result = run(url, trained)
    assert result.exit_code == 3, result.output
    assert why in result.output
