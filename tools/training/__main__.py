"""The command line: ``python -m training``."""

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from measuring.results import chosen
from proofserve.engines.checkpoints import weights_digest
from proofserve.models.architectures import build_tokenizer
from training import data, train
from training.recipes import RECIPES, SEED, Recipe

PROMPTS = ("Hello!", "What is a nonce?", "What does textwrap.fill do?", "Tell me a story.")


def main(
    folder: Annotated[Path, typer.Argument(help="Where a folder for each checkpoint goes.")],
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(RECIPES)}; repeat it for several. All if unset."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps in all, other ones than the model's own.", min=1)
    ] = None,
) -> None:
    """Train the small models, each into a checkpoint in bfloat16."""
    names = chosen(model, RECIPES, "models")
    torch.use_deterministic_algorithms(mode=True)
    console = Console()
    for name in names:
        _train(name, RECIPES[name], steps or RECIPES[name].steps, folder / name, console)


def _train(name: str, recipe: Recipe, steps: int, folder: Path, console: Console) -> None:
    began = time.process_time()
    torch.set_num_threads(recipe.threads)
    model = recipe.new_model()
    tokenizer = build_tokenizer(model.config.max_position_embeddings)
    texts = data.read(tokenizer, SEED)
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{name}: {count:,} parameters, {len(texts.train):,} tokens of text")
    train.train(model, recipe, texts, steps, console.print)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    console.print(f"held out: {train.nats_per_byte(model, recipe, texts):.3f} nats a byte")
    if recipe.balance:
        for layer, use in enumerate(train.expert_use(model, texts)):
            console.print(f"layer {layer}: experts are used {use.min():.2f} to {use.max():.2f}")
    for prompt in PROMPTS:
        console.print(f"[bold]{prompt}[/bold] {_answer(model, tokenizer, prompt)}")
    minutes = (time.process_time() - began) / 60
    console.print(f"{folder}: weights digest {weights_digest(folder)}, {minutes:.1f} CPU minutes")


def _answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=80, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(answer, skip_special_tokens=True))


if __name__ == "__main__":
    typer.run(main)
