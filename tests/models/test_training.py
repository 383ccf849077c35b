"""Training of small models: its texts, its windows, and that they learn, always the same."""

from itertools import islice
from random import Random

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from proofserve.models.architectures import build_tokenizer
from proofserve.models.trained import MIXTURE
from training import data, train
from training.recipes import RECIPES

LINE = "A nonce is a number. A proof is a small vector. "


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(4096)


@pytest.fixture(scope="module")
def docstrings() -> list[data.Docstring]:
    return data.docstrings()


def test_docstrings_have_the_name_by_which_a_program_reaches_them(
    docstrings: list[data.Docstring],
) -> None:
    by_name = {entry.name: entry.text for entry in docstrings}
    assert by_name["textwrap.TextWrapper.wrap"].startswith("wrap(text : string)")
    assert by_name["json"].startswith("JSON (JavaScript Object Notation)")
    assert not any(name.startswith(("test.", "idlelib.")) for name in by_name)


def test_a_chat_asks_for_a_public_name_and_answers_with_a_sentence(
    docstrings: list[data.Docstring],
) -> None:
    made = data.chats(docstrings, Random(0))
    assert len(made) > 2000
    assert all(chat.answer[-1] in ".!?:" for chat in made)
    assert not any("._" in chat.question for chat in made)
    written = data.written_chats()
    assert all(made.count(chat) == data.WRITTEN_COPIES for chat in written)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "WINDOWS_PER_STEP", 2)


def test_several_ways_to_ask_have_one_answer() -> None:
    answers = {chat.question: chat.answer for chat in data.written_chats()}
    assert answers["What is a nonce?"] == answers["Explain what a nonce is."]
    assert len(answers) == len(data.written_chats())


def test_no_text_that_is_held_out_is_trained_on(docstrings: list[data.Docstring]) -> None:
    trained, held_out = data.divided(docstrings, Random(0))
    assert len(held_out) > 50
    assert not {entry.text for entry in trained} & {entry.text for entry in held_out}


def test_windows_overlap_by_the_token_that_is_only_predicted() -> None:
    ids = torch.arange(1000)
    rows = torch.cat(list(islice(data.batches(ids, length=10, size=4, seed=0), 20)))
    assert rows.shape == (80, 11)
    assert torch.equal(rows[:, 1:] - rows[:, :-1], torch.ones(80, 10, dtype=torch.long))
    # A pass of 24 steps takes each window once.
    assert len({int(row[0]) for row in rows}) == 80


def texts(tokenizer: PreTrainedTokenizerFast) -> data.Data:
    ids = torch.tensor(tokenizer(LINE * 2000, add_special_tokens=False)["input_ids"])
    return data.Data(ids, ids, ids[:1000], len(LINE) * 50)


def trained(
    name: str, tokenizer: PreTrainedTokenizerFast, steps: int
) -> tuple[PreTrainedModel, list[str]]:
    recipe, lines = RECIPES[name], list[str]()
    model = recipe.new_model()
    # A step of Muon computes in bfloat16: of all six layers it takes ten seconds on a processor
    # without instructions for that.
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    train.train(model, recipe, texts(tokenizer), steps, lines.append)
    return model, lines


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("name", RECIPES)
def test_training_learns(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    _, lines = trained(name, tokenizer, 25)
    loss = float(lines[0].split("loss ")[1].split(",")[0])
    assert loss < 4.0  # an untrained model has log 2048 = 7.6


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("name", RECIPES)
def test_training_gives_the_same_weights_again(
    name: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    (first, _), (second, _) = trained(name, tokenizer, 5), trained(name, tokenizer, 5)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.usefixtures("small_steps")
def test_every_matrix_of_every_expert_learns(tokenizer: PreTrainedTokenizerFast) -> None:
    before = RECIPES[MIXTURE.name].new_model().model.layers[0].mlp.experts
    after = trained(MIXTURE.name, tokenizer, 5)[0].model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        moved = (getattr(after, name) - getattr(before, name)).abs().amax(dim=(1, 2))
        assert moved.min() > 0


def test_a_layer_that_forgets_experts_costs_something_whatever_other_layers_do() -> None:
    equal = torch.eye(8).repeat(4, 1)
    assert train.unequal_use([equal, equal], chosen=1).item() == pytest.approx(1.0)
    first = torch.eye(8)[:4].repeat(8, 1) * 10
    assert train.unequal_use([first, first.flip(1)], chosen=1).item() == pytest.approx(2, abs=0.01)


def test_the_use_of_experts_is_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    model = RECIPES[MIXTURE.name].new_model()
    use = train.expert_use(model, texts(tokenizer))
    assert use.shape == (6, 16)
    torch.testing.assert_close(use.mean(dim=1), torch.ones(6))
    with torch.no_grad():
        model.model.layers[2].mlp.gate.weight.zero_()
    # Ties go to the same experts each time.
    assert train.expert_use(model, texts(tokenizer))[2].max() == 4.0
