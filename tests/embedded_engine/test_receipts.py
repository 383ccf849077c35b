"""The tap of receipts on a real engine, against the reference engine.

The engine computes in float32, so that a sketch differs by little more than its own rounding to
float16. Sketches of neighbouring tokens are about 1 apart.
"""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from vllm import SamplingParams

from proofserve.engines.receipts import client
from proofserve.engines.receipts.client import VllmAnswers
from proofserve.protocol.receipts.record import Sampling
from proofserve.rounds.errors import EngineFault
from support.engines import EmbeddedEngine, workload
from support.receipts import Checker, ask, collected, leave_after, prompt

pytestmark = pytest.mark.engine

FARTHEST = 0.002


@dataclass(frozen=True)
class Tapped:
    """The shared engine with receipts, and its greedy answers from before they were on."""

    engine: EmbeddedEngine
    answers: VllmAnswers
    without: list[list[tuple[int, ...]]]
    checker: Checker


async def chats(engine: EmbeddedEngine, name: str) -> list[list[tuple[int, ...]]]:
    return list(
        await asyncio.gather(
            *(ask(engine, f"chatcmpl-{name}-{i}", prompt(i, 30 + 9 * i)) for i in range(8))
        )
    )


@pytest.fixture(scope="session")
def tapped(engine: EmbeddedEngine, tiny: Path) -> Tapped:
    without = engine.run(chats(engine, "without"))
    engine_info = engine.engine.engine_info
    answers = engine.run(client.start(engine.llm, engine_info, k_dim=32))
    return Tapped(engine, answers, without, Checker(tiny))


def test_answers_are_the_same_with_receipts_and_each_has_its_sketches(tapped: Tapped) -> None:
    async def run() -> None:
        assert await chats(tapped.engine, "with") == tapped.without
        ids = {f"chatcmpl-with-{i}" for i in range(8)}
        found = {each.response_id: each for each in await collected(tapped.answers, ids)}
        for i, (output,) in enumerate(tapped.without):
            answer = found[f"chatcmpl-with-{i}"]
            assert answer.prompt_ids == tuple(prompt(i, 30 + 9 * i))
            assert answer.output_ids == output
            assert (answer.choice, answer.adapter, answer.finish_reason) == (0, None, "length")
            assert answer.sampling == Sampling(temperature=0.0)
        assert tapped.checker.worst(found.values()) < FARTHEST

    tapped.engine.run(run())


def test_a_sketch_is_of_its_own_token_and_key(tapped: Tapped) -> None:
    async def run() -> None:
        await ask(tapped.engine, "chatcmpl-own", prompt(40, 50))
        (answer,) = await collected(tapped.answers, {"chatcmpl-own"})
        assert answer.sketches is not None
        size = 2 * answer.k_dim
        shifted = answer.sketches[size:] + answer.sketches[:size]
        for changed in ({"sketches": shifted}, {"sketch_key": "another"}):
            fields = {name: getattr(answer, name) for name in answer.__slots__}
            other = type(answer)(**{**fields, **changed})
            assert tapped.checker.distances(other).min() > 0.1

    tapped.engine.run(run())


def test_prompts_that_are_read_in_parts(tapped: Tapped) -> None:
    scheduler = tapped.engine.llm.vllm_config.scheduler_config
    # No whole number of them fills a step, so the scheduler divides some.
    assert scheduler.max_num_batched_tokens < 900 * 5
    assert scheduler.max_num_batched_tokens % 900

    async def run() -> None:
        ids = [f"chatcmpl-long-{i}" for i in range(6)]
        await asyncio.gather(
            *(ask(tapped.engine, name, prompt(50 + i, 900)) for i, name in enumerate(ids))
        )
        assert tapped.checker.worst(await collected(tapped.answers, ids)) < FARTHEST

    tapped.engine.run(run())


def test_a_prompt_whose_beginning_is_cached(tapped: Tapped) -> None:
    async def run() -> None:
        for name in ("first", "second"):
            await ask(tapped.engine, f"chatcmpl-{name}", prompt(60, 700))
        ids = ["chatcmpl-first", "chatcmpl-second"]
        first, second = await collected(tapped.answers, ids)
        assert first.output_ids == second.output_ids
        assert tapped.checker.worst([first, second]) < FARTHEST

    tapped.engine.run(run())


@pytest.mark.skipif(
    "TRITON_INTERPRET" in os.environ, reason="vLLM's kernel for top_p needs Triton's compiler"
)
def test_several_answers_to_one_request(tapped: Tapped) -> None:
    async def run() -> None:
        given = await ask(
            tapped.engine, "cmpl-several-1", prompt(70, 40), n=3, temperature=1.0, top_p=0.9, seed=5
        )
        answers = await collected(tapped.answers, {"cmpl-several"})
        while len(answers) < 3:
            answers += await collected(tapped.answers, {"cmpl-several"})
        answers.sort(key=lambda each: each.choice)
        # The second prompt's answers come after the three of the first.
        assert [each.choice for each in answers] == [3, 4, 5]
        assert [each.output_ids for each in answers] == given
        assert len(set(given)) == 3
        assert answers[0].sampling == Sampling(temperature=1.0, top_p=0.9)
        assert tapped.checker.worst(answers) < FARTHEST

    tapped.engine.run(run())


def test_a_client_that_leaves(tapped: Tapped) -> None:
    async def run() -> None:
        await leave_after(tapped.engine, "chatcmpl-left", prompt(80, 60), tokens=10)
        (answer,) = await collected(tapped.answers, {"chatcmpl-left"})
        assert answer.finish_reason == "abort"
        assert 10 <= len(answer.output_ids) < 800
        assert tapped.checker.worst([answer]) < FARTHEST

    tapped.engine.run(run())


def test_a_stop_string(tapped: Tapped) -> None:
    async def run() -> None:
        (whole,) = await ask(tapped.engine, "chatcmpl-whole", prompt(90, 60))
        tokenizer = tapped.engine.llm.get_tokenizer()
        stop = tokenizer.decode(list(whole[8:10]))
        (given,) = await ask(tapped.engine, "chatcmpl-stopped", prompt(90, 60), stop=[stop])
        (answer,) = await collected(tapped.answers, {"chatcmpl-stopped"})
        assert answer.finish_reason == "stop"
        # The engine may be ahead by a token or two when the API process finds the string.
        assert answer.output_ids == given
        assert len(given) < len(whole)
        assert tapped.checker.worst([answer]) < FARTHEST

    tapped.engine.run(run())


def test_log_probabilities_and_restrictions(tapped: Tapped) -> None:
    async def run() -> None:
        wide = {"logprobs": 5, "prompt_logprobs": 2, "repetition_penalty": 1.2}
        await ask(tapped.engine, "chatcmpl-wide", prompt(100, 60), **wide)
        await ask(tapped.engine, "chatcmpl-bias", prompt(101, 60), logit_bias={500: 5.0})
        found = await collected(tapped.answers, ["chatcmpl-wide", "chatcmpl-bias"])
        penalised, biased = (each.sampling for each in found)
        assert penalised == Sampling(temperature=0.0, repetition_penalty=1.2)
        assert biased.restricted
        assert tapped.checker.worst(found) < FARTHEST

    tapped.engine.run(run())


def test_proofs_between_chats_do_not_disturb_receipts(tapped: Tapped) -> None:
    async def run() -> None:
        async with tapped.engine.engine.session(workload()) as prove:
            proofs = asyncio.gather(prove(range(64)), prove(range(64, 128)))
            ids = [f"chatcmpl-beside-{i}" for i in range(4)]
            for i, name in enumerate(ids):
                await ask(tapped.engine, name, prompt(110 + i, 60))
            found = await collected(tapped.answers, ids)
            await proofs
        assert tapped.checker.worst(found) < FARTHEST

    tapped.engine.run(run())


def test_an_answer_arrives_while_other_chat_goes_on(tapped: Tapped) -> None:
    async def run() -> None:
        endless = asyncio.create_task(
            leave_after(tapped.engine, "chatcmpl-endless", prompt(120, 60), tokens=750)
        )
        await ask(tapped.engine, "chatcmpl-short", prompt(121, 60))
        (answer,) = await collected(tapped.answers, {"chatcmpl-short"})
        assert not endless.done()
        assert tapped.checker.worst([answer]) < FARTHEST
        await endless
        await collected(tapped.answers, {"chatcmpl-endless"})

    tapped.engine.run(run())


def test_a_request_given_as_text_has_the_tokens_that_the_engine_read(tapped: Tapped) -> None:
    async def run() -> None:
        stream = tapped.engine.llm.generate(
            "Tell me a story.", SamplingParams(max_tokens=8, temperature=0.0), "chatcmpl-text"
        )
        read = [output.prompt_token_ids async for output in stream]
        (answer,) = await collected(tapped.answers, {"chatcmpl-text"})
        assert list(answer.prompt_ids) == read[-1]
        assert tapped.checker.worst([answer]) < FARTHEST

    tapped.engine.run(run())


def test_receipts_start_once(tapped: Tapped) -> None:
    engine_info = tapped.engine.engine.engine_info
    with pytest.raises(EngineFault, match="started before"):
        tapped.engine.run(client.start(tapped.engine.llm, engine_info, k_dim=32))
