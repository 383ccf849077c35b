"""The command line: ``python -m training``."""

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from proofserve.engines.checkpoints.digest import weights_digest
from proofserve.models.tokenizer import build_tokenizer
from training import data, train

THREADS = 2
PROMPTS = ("Hello!", "What is a nonce?", "What does textwrap.fill do?", "Tell me a story.")


def main(
    folder: Annotated[Path, typer.Argument(help="Where the checkpoint goes.")],
    steps: Annotated[int, typer.Option(help="Steps in all.", min=1)] = 700,
) -> None:
    """Train the small model and write it as a checkpoint in bfloat16."""
    # The sums of a different number of threads round differently.
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(mode=True)
    console = Console()
    model = train.new_model()
    tokenizer = build_tokenizer(model.config.max_position_embeddings)
    texts = data.read(tokenizer, train.SEED)
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{count:,} parameters, {len(texts.train):,} tokens of text")
    train.train(model, texts, steps, console.print)
    model = model.to(torch.bfloat16)
    _write(model, tokenizer, folder)
    console.print(f"held out: {train.nats_per_byte(model, texts):.3f} nats a byte")
    for prompt in PROMPTS:
        console.print(f"[bold]{prompt}[/bold] {_answer(model, tokenizer, prompt)}")
    minutes = time.process_time() / 60
    console.print(f"{folder}: weights digest {weights_digest(folder)}, {minutes:.1f} CPU minutes")


def _write(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _answer(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=80, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(answer, skip_special_tokens=True))


if __name__ == "__main__":
    typer.run(main)
