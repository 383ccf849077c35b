"""Who wrote the answers of a model of our own, whose logits depend on the last token alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.engines.reference.suspects import SKIPPED
from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.receipts.sampled import log_probabilities
from proofserve.verifier.chat.writers import (
    MOST_TOKENS,
    WRITERS,
    WriterFinding,
    Writers,
    WrittenAnswer,
)
from proofserve.verifier.judges import OWN, PUBLISHED, BankRun, Chances
from proofserve.verifier.written.readings import Readings

VOCABULARY = 50
CHANCES = Chances(alpha=1e-6, beta=1e-3)
EIGHT = "int8 per channel"
# What the weights of writers move.
MOVED = {SKIPPED: 2.0, "int4 g128": 0.8, "fp8 per channel": 0.3, EIGHT: 0.01}
GREEDY = Sampling(temperature=0.0)
NUCLEUS = Sampling(temperature=0.7, top_p=0.9, top_k=20)


class TableModel:
    """Each of ``kernels`` moves every logit by ``noise``, as near a tie between experts."""

    names = tuple(WRITERS)
    references = (str(OWN.kernels),)
    hides_lies = False
    round_activations = False

    def __init__(self, seed: int, kernels: Sequence[str] = (), noise: float = 1e-4) -> None:
        self.table = np.random.default_rng(seed).normal(0, 3, (VOCABULARY, VOCABULARY))
        self.kernels = (*self.references, *kernels)
        self._noise = noise
        # Of each run, the answers that it read.
        self.reads = Counter[BankRun]()

    def states(self, run: BankRun, chats: Sequence[Any]) -> list[NDArray[np.int64]]:
        """The tokens before those that they choose."""
        self.reads[run] += len(chats)
        # It uses the experts that the published weights chose.
        assert run.weights is None or self.reads[PUBLISHED]
        return [np.array([prompt[-1], *output[:-1]]) for prompt, output in chats]

    def logits(self, run: BankRun, states: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.by(run).table[states].astype(np.float32)

    def by(self, run: BankRun) -> "TableModel":
        """The model as an honest kernel computes it, or with a writer's weights."""
        made = TableModel(0)
        moved = self._noise if run.weights is None else MOVED[run.weights]
        seed = int.from_bytes(f"{run.weights} {run.kernels}".encode(), "big")
        noise = np.random.default_rng(seed).normal(0, moved, self.table.shape)
        made.table = self.table + noise * (run != PUBLISHED)
        return made

    def writes(self, number: int, sampling: Sampling, tokens: int = 100) -> WrittenAnswer:
        draw = np.random.default_rng(number)
        output: list[int] = []
        for _ in range(tokens):
            logits = self.table[[output[-1] if output else number % VOCABULARY]]
            if sampling.temperature == 0.0:
                output.append(int(logits.argmax()))
            else:
                p = np.exp(log_probabilities(logits, sampling))[0]
                output.append(int(draw.choice(VOCABULARY, p=p / p.sum())))
        return WrittenAnswer((7, number % VOCABULARY), tuple(output), sampling)


MODEL, OTHER = TableModel(0), TableModel(1)


def judged(*answers: WrittenAnswer, by: TableModel = MODEL, bits: int = 4) -> WriterFinding:
    writers = Writers(Readings(by, by.names), CHANCES, bits)  # type: ignore[arg-type]
    writers.add(answers)
    writers.compare()
    return writers.finding()


def convicting(found: WriterFinding) -> set[str]:
    return {each.test for each in found.opinions if each.result == "fraud"}


@pytest.mark.parametrize("sampling", [Sampling(), NUCLEUS, GREEDY, Sampling(temperature=2.0)])
def test_own_tokens_are_not_convicted_and_another_model_s_are(sampling: Sampling) -> None:
    honest = judged(*(MODEL.writes(n, sampling) for n in range(20)))
    assert not honest.convicts
    assert sum(each.nonces for each in honest.opinions) >= 2000
    cheap = judged(*(OTHER.writes(n, sampling) for n in range(20)))
    assert ("greedy" if sampling == GREEDY else "tokens") in convicting(cheap)


@pytest.mark.parametrize("sampling", [Sampling(), NUCLEUS, GREEDY])
def test_a_writer_of_the_bank_is_named_or_ruled_out(sampling: Sampling) -> None:
    cheap = MODEL.by(BankRun("int4 g128"))
    found = judged(*(cheap.writes(n, sampling) for n in range(20)))
    assert found.convicts
    if sampling.temperature:
        assert [each.text[:9] for each in found.opinions if each.test == "likelihood"] == [
            "int4 g128"
        ]
    honest = judged(*(MODEL.writes(n, sampling) for n in range(20)))
    assert "int4 g128" in honest.ruled_out
    assert honest.enough


def test_until_then_it_is_untested_and_the_report_says_how_many_answers_it_takes() -> None:
    answers = [MODEL.writes(n, Sampling()) for n in range(6)]
    found = judged(*answers, bits=8)
    assert (found.convicts, found.enough) == (False, False)
    text = next(each for each in found.untested if each.startswith(EIGHT))
    more = int(text.split()[3].replace(",", ""))
    # Rounding of 0.01 on the logits: 1e-4 / 2 nats a token at most, 6.9 are needed.
    assert 6.9 / (100 * 1e-4) < more < 10_000
    assert found.ruled_out[:2] == (SKIPPED, "int4 g128")
    none = f"written by: untested against {SKIPPED}: no answer; int4 g128: no answer"
    assert next(judged().lines()).startswith(none)


def test_greedy_answers_alone_do_not_rule_out_who_wrote_sampled_ones() -> None:
    greedy = [MODEL.writes(n, GREEDY) for n in range(10)]
    assert "int4 g128" in judged(*greedy).ruled_out
    found = judged(*greedy, MODEL.writes(0, Sampling(), tokens=8))
    assert "int4 g128" not in found.ruled_out
    assert found.untested[0].endswith("more sampled answers")


def test_the_same_chat_again_is_no_evidence() -> None:
    answer = MODEL.writes(0, GREEDY)
    writers = Writers(Readings(MODEL, ()), CHANCES, 0)  # type: ignore[arg-type]
    for _ in range(3):
        writers.add([answer])
    assert [each.nonces for each in writers.finding().opinions] == [0, 100]


def test_of_a_long_answer_a_part_is_read() -> None:
    long = MODEL.writes(3, replace(NUCLEUS, repetition_penalty=1.0), tokens=300)
    part = WrittenAnswer(long.prompt_ids, long.output_ids[:228], long.sampling, first=100)
    found = judged(part)
    assert found.opinions[0].nonces == MOST_TOKENS
    before, read = part.read
    assert (len(before), before + read) == (102, (*long.prompt_ids, *long.output_ids[:228]))


def test_a_token_that_top_k_excludes_convicts_alone() -> None:
    answer = MODEL.writes(0, replace(NUCLEUS, top_k=5))
    least = int(MODEL.table[answer.output_ids[49]].argmin())
    output = (*answer.output_ids[:50], least, *answer.output_ids[51:])
    found = judged(replace(answer, output_ids=output))
    assert convicting(found) == {"tokens"}
    assert found.opinions[0].text.startswith("a token cannot have been drawn as stated")


KERNELS = [f"kernel {n}" for n in range(12)]


@pytest.mark.parametrize(
    ("noise", "below", "convicts"), [(1e-4, 0.1, False), (0.3, 1.2, False), (0.3, 6.0, True)]
)
def test_a_token_just_below_the_least_kept_is_no_evidence(
    noise: float, below: float, convicts: bool
) -> None:
    """A server rounds logits otherwise, and may keep another one of two that are nearly equal."""
    sampling = Sampling(top_k=3)
    moved = TableModel(0, KERNELS, noise)
    order = np.argsort(-MODEL.table[7])
    moved.table[7, order[3]] = moved.table[7, order[2]] - below
    answer = WrittenAnswer((7, 7), (int(order[3]),), sampling)
    assert judged(answer, by=moved).convicts is convicts


@pytest.mark.parametrize("sampling", [Sampling(), NUCLEUS])
def test_a_kernel_that_moves_logits_by_much_is_as_honest_as_those_that_are_emulated(
    sampling: Sampling,
) -> None:
    """Its tokens are not drawn from the exact distribution: by that alone it would be convicted."""
    noisy = TableModel(0, KERNELS, noise=0.7)
    foreign = noisy.by(BankRun(kernels="a kernel that nobody emulates"))
    answers = [foreign.writes(n, sampling) for n in range(60)]
    assert judged(*answers).convicts
    assert not judged(*answers, by=noisy).convicts
    cheap = [OTHER.writes(n, sampling) for n in range(60)]
    assert judged(*cheap, by=noisy).convicts


def test_honest_kernels_read_only_what_would_convict() -> None:
    model = TableModel(0, KERNELS)
    judged(*(model.writes(n, Sampling()) for n in range(8)), by=model)
    assert {run: model.reads[run] for run in (PUBLISHED, OWN)} == {PUBLISHED: 8, OWN: 8}
    assert not any(model.reads[BankRun(kernels=name)] for name in KERNELS)


@pytest.mark.parametrize("sampling", [Sampling(), GREEDY])
def test_no_network_reads_an_answer_twice(sampling: Sampling) -> None:
    model = TableModel(0, KERNELS)
    writer = model.by(BankRun(SKIPPED))
    answers = [writer.writes(n, sampling) for n in range(12)]
    assert judged(*answers, by=model).convicts
    assert set(model.reads.values()) == {12}
    assert {run.kernels for run in model.reads} >= {*KERNELS}


def test_evidence_that_goes_on_is_read_by_the_published_weights_before_a_suspect() -> None:
    """So it is where it convicts: without the published experts a suspect cannot read."""
    earlier = Writers(Readings(MODEL, MODEL.names), CHANCES, 4)  # type: ignore[arg-type]
    writer = MODEL.by(BankRun(SKIPPED))
    reads = earlier.add([writer.writes(n, Sampling()) for n in range(40)]) + earlier.compare()
    later_model = TableModel(0, KERNELS)
    later = Writers(Readings(later_model, later_model.names), CHANCES, 4)  # type: ignore[arg-type]
    for read in reads:
        later.restore(read, earlier.by_writers(read))
    assert later.finding().convicts
    assert later_model.reads[PUBLISHED]


def test_restricted_tokens_are_not_tested() -> None:
    answer = replace(OTHER.writes(0, Sampling()), sampling=Sampling(restricted=True))
    assert {each.nonces for each in judged(answer).opinions} == {0}


def test_penalties_count() -> None:
    """With a penalty that the receipt does not state, tokens repeat too seldom."""
    stated = Sampling(repetition_penalty=3.0)
    more = [replace(MODEL.writes(n, Sampling()), sampling=stated) for n in range(20)]
    assert judged(*more).convicts
