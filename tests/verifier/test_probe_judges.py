"""What a probe concludes about endpoints of a made-up model, whose kernels may err as mixtures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.verifier.judges import OWN, PUBLISHED, BankRun, Chances
from proofserve.verifier.probe.endpoint import Alternatives, Kind, ProbePrompt, RawAnswer
from proofserve.verifier.probe.probing import ProbeResult, Probing, prompts

VOCABULARY, TOKENS = 60, 32
CHANCES = Chances(alpha=1e-6, beta=1e-3)
# What suspects' weights move, and what honest rounding does, in nats.
MOVED, ROUNDED = 0.3, 0.05
# The first of them are those that servers have.
SERVED = 4
KERNELS = (str(OWN.kernels), *(f"kernel {n}" for n in range(8)))
SUSPECTS = ("int8", "fp8", "int4")

Logits = NDArray[np.float32]
# The ids of a prompt and of its answer.
Read = tuple[tuple[int, ...], tuple[int, ...]]


def seeded(*of: object) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(repr(of).encode(), "big"))


@dataclass(frozen=True)
class MadeUpModel:
    """``lean`` is the part of a suspect's change that every honest kernel makes too.

    So do those of a mixture near a tie between experts. ``rounded`` is what they do to each logit
    besides, and ``shared`` the part of its square that all honest kernels have in common.
    """

    lean: float = 0.0
    rounded: float = ROUNDED
    shared: float = 0.5
    names: Sequence[str] = SUSPECTS
    kernels: Sequence[str] = KERNELS
    references: Sequence[str] = KERNELS[:SERVED]
    hides_lies: bool = False
    round_activations: bool = False

    def states(self, run: BankRun, answers: Sequence[Read]) -> list[Logits]:
        if run == PUBLISHED:
            return [*map(self.exact, answers)]
        if run.weights is not None:
            return [*map(partial(self.suspected, run.weights), answers)]
        return [*map(partial(self.honest, run.kernels), answers)]

    def logits(self, _: BankRun, states: Logits) -> Logits:
        return states

    def exact(self, read: Read) -> Logits:
        # Only the prompt decides, so that an answer can be drawn at once.
        return seeded(read[0]).normal(0, 2, (TOKENS, VOCABULARY)).astype(np.float32)

    def suspected(self, name: str, read: Read) -> Logits:
        return self.exact(read) + self._moved(name, read)

    def honest(self, kernel: str, read: Read) -> Logits:
        lean = self.lean * self._moved("int8", read)
        shared, own = np.sqrt([self.shared, 1.0 - self.shared], dtype=np.float32)
        noise = shared * self._noise("footprint", read) + own * self._noise(kernel, read)
        return self.exact(read) + lean + noise

    def cheat(self, name: str, read: Read) -> Logits:
        """Other weights change what is rounded everywhere."""
        lean = self.lean * self._moved("int8", read)
        moved = lean + self._moved(name, read)
        return self.exact(read) + moved + self._noise(f"rounding of {name}", read)

    def rough(self, read: Read) -> Logits:
        """Weights changed in no known way."""
        return self.honest("a foreign kernel", read) + 8 * self._noise("rough", read)

    def _moved(self, name: str, read: Read) -> Logits:
        return seeded(name, read[0]).normal(0, MOVED, (TOKENS, VOCABULARY)).astype("f4")

    def _noise(self, name: str, read: Read) -> Logits:
        noise = seeded(name, read[0]).normal(0, self.rounded, (TOKENS, VOCABULARY))
        return noise.astype("f4")


class NoTokenizer:
    size = VOCABULARY

    @property
    def pieces(self) -> dict[str, int]:
        return {f"t{n}": n for n in range(VOCABULARY)}

    def prompt_ids(self, request: Mapping[str, Any]) -> tuple[int, ...]:
        return self.answer_ids(request.get("prompt") or request["messages"][0]["content"])

    def answer_ids(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def text(self, ids: Sequence[int]) -> str:
        return "".join(f"t{each}" for each in ids)


def answered(prompt: ProbePrompt, logits: Logits, top: int) -> RawAnswer:
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    noise = 0.0 if prompt.greedy else seeded("drawn", prompt.number).gumbel(size=logs.shape)
    ids = tuple((logs + noise).argmax(axis=1).tolist())
    tops = []
    for token, row in zip(ids, logs, strict=True):
        places = {token, *np.argsort(-row)[:top].tolist()}
        tops.append(Alternatives(f"t{token}", tuple((f"t{n}", float(row[n])) for n in places)))
    text = prompt.text
    read = NoTokenizer().answer_ids(text)
    return RawAnswer(
        prompt,
        NoTokenizer().text(ids),
        "length",
        len(read),
        len(ids),
        read,
        ids,
        tuple(tops) if top else (),
    )


def probed(model: MadeUpModel, serve: object, count: int = 24, top: int = 20) -> ProbeResult:
    probing = Probing(NoTokenizer(), model, CHANCES)
    asked = tuple(prompts("seed", count, (Kind.CHAT, Kind.COMPLETION)))
    for first in range(0, count, 4):
        group = asked[first : first + 4]
        reads = [(NoTokenizer().answer_ids(each.text), (0,)) for each in group]
        raws = [answered(p, serve(r), top) for p, r in zip(group, reads, strict=True)]  # type: ignore[operator]
        if probing.add(raws) in {"honest", "fraud"}:
            break
    return probing.probed(first + 4)


@pytest.mark.parametrize(("lean", "labels"), [(0.0, {"honest"}), (0.2, {"honest", "cannot tell"})])
def test_an_endpoint_that_rounds_as_honest_kernels_do_is_not_convicted(
    lean: float, labels: set[str]
) -> None:
    """Also where these lean to a suspect: near a tie between experts errors do."""
    model = MadeUpModel(lean)
    found = probed(model, partial(model.honest, "a foreign kernel"))
    assert found.label in labels, found.opinions


@pytest.mark.parametrize("lean", [0.0, 0.2])
@pytest.mark.parametrize("name", SUSPECTS)
def test_suspected_weights_are_named(name: str, lean: float) -> None:
    model = MadeUpModel(lean)
    found = probed(model, partial(model.cheat, name))
    assert (found.label, found.suspect) == ("quantised", name)
    assert found.asked <= 16


def test_errors_far_larger_than_those_of_all_kernels_convict_by_their_size() -> None:
    model = MadeUpModel()
    found = probed(model, model.rough)
    assert found.label == "another model"
    assert [each.test for each in found.opinions if each.result == "fraud"] == ["sizes", "paired"]


@pytest.mark.parametrize("shared", [0.5, 0.0])
@pytest.mark.parametrize("times", [1, 2])
def test_only_a_footprint_clears_a_kernel_that_is_not_rougher_than_all_known(
    times: float, shared: float
) -> None:
    """A rougher one may hide a lie. It is no fraud either."""
    other = MadeUpModel(rounded=times * ROUNDED, shared=shared)
    found = probed(MadeUpModel(), partial(other.honest, "a foreign kernel"))
    label = "honest" if times == 1 and shared else "cannot tell"
    assert found.label == label, found.opinions


def test_no_footprint_clears_where_the_checkpoint_s_own_cache_hides_lies() -> None:
    hiding = MadeUpModel(hides_lies=True)
    found = probed(hiding, partial(hiding.honest, "a foreign kernel"))
    assert found.label == "cannot tell", found.opinions
    assert "footprint" not in {each.test for each in found.opinions}


@pytest.mark.parametrize("rounded", [0.05, 0.8])
def test_tokens_of_rough_kernels_are_honest_without_log_probabilities_too(rounded: float) -> None:
    """Text of a mixture is that of logits which rounding has moved by much."""
    model = MadeUpModel(0.2, rounded)
    found = probed(model, partial(model.honest, "a foreign kernel"), count=80, top=0)
    assert found.label in {"honest", "cannot tell"}, found.opinions
    other = MadeUpModel(0.2, rounded)
    found = probed(model, lambda read: other.exact(((1, *read[0]), (0,))), top=0)
    assert found.label == "another model"
