"""A calibration of chat: a population for every server and every emulated kernel."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.receipts.sketches import ReceiptScheme
from proofserve.reports import Progress
from proofserve.verifier.calibration_file import CalibrationFile, KernelFacts
from proofserve.verifier.chat.answers import BLOCK_TOKENS, Answer, Blocks
from proofserve.verifier.chat.verification import calibration_lines, chat_calibration
from proofserve.verifier.judges import OWN, BankRun, Vectors
from proofserve.verifier.noise import checked

K_DIM, BLOCKS, VOCABULARY = 16, 4, 12
ROUNDED, MOVED = 0.01, 0.03
REFERENCE = str(OWN.kernels)
KERNELS = {REFERENCE: ROUNDED, "rough": 1.5 * ROUNDED, "fine": 0.8 * ROUNDED}
SUSPECTS = ("int8", "fp8")
# The share of squared errors that servers and our own rounding have in common, and the others.
SHARED = 0.5
OTHERS = ("rough", "fine")

Floats = NDArray[np.float32]


def seeded(*of: object) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(repr(of).encode(), "big"))


def exact(answer: str) -> Floats:
    return seeded("exact", answer).normal(0, 0.2, (BLOCKS * BLOCK_TOKENS, K_DIM)).astype("f4")


def noise(kind: str, answer: str, size: float) -> Floats:
    """The errors of one conversation are alike: they share their size."""
    scale = size * np.exp(seeded("of", kind, answer).normal(0, 0.2))
    own, footprint = (
        seeded(each, answer).normal(0, scale, (BLOCKS * BLOCK_TOKENS, K_DIM)).astype("f4")
        for each in (kind, f"footprint {kind in OTHERS}")
    )
    shared, apart = np.sqrt([SHARED, 1.0 - SHARED], dtype=np.float32)
    return own if kind in SUSPECTS else shared * footprint + apart * own


def answer(number: int, server: str) -> Answer:
    name = f"{server}-{number}"
    sketches = exact(name) + noise(server, name, ROUNDED)
    scheme = ReceiptScheme(server, "00" * 32, K_DIM)
    output = tuple((number + i) % VOCABULARY for i in range(len(sketches)))
    temperature = float(number % 2)
    return Answer(name, (1,), output, Sampling(temperature=temperature), scheme, sketches)


@dataclass
class MadeUpValidator:
    blocks: Blocks
    names: Sequence[str] = SUSPECTS
    kernels: Sequence[str] = tuple(KERNELS)
    references: Sequence[str] = (REFERENCE, "rough")
    weights_digest: str | None = "ab" * 32
    served_dtype: str = "bfloat16"

    def expect(self, runs: Mapping[BankRun, Sequence[int]]) -> None:
        """It has no forwards to save."""

    def truth(self, nonces: Sequence[int]) -> Vectors:
        return self._vectors(nonces, {})

    def errors(self, run: BankRun, nonces: Sequence[int]) -> Vectors:
        assert run.kernels is not None
        assert run.weights is None
        return self._vectors(nonces, {run.kernels: KERNELS[run.kernels]}, of_errors=True)

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        return self._vectors(nonces, {name: MOVED}, of_errors=True)

    def kernel_facts(self, kernel: str) -> KernelFacts:
        return facts(kernel, emulated=True)

    def _vectors(
        self, nonces: Sequence[int], of: Mapping[str, float], of_errors: bool = False
    ) -> Vectors:
        made = {}
        for index, each in enumerate(self.blocks.answers):
            errors = [noise(kind, each.name, size) for kind, size in of.items()]
            made[index] = sum(
                errors, np.zeros_like(each.sketches) if of_errors else exact(each.name)
            )
        return dict(zip(nonces, self.blocks.vectors(made, nonces), strict=True))


def facts(name: str, emulated: bool = False) -> KernelFacts:
    unknown = dict.fromkeys(("engine", "processor", "torch", "dtype", "kv_dtype", "attention"))
    return KernelFacts(name=name, emulated=emulated, ranks=None, **unknown)


@pytest.fixture(scope="module")
def blocks() -> Blocks:
    return Blocks([answer(n, server) for server in ("key a", "key b") for n in range(24)], "seed")


@pytest.fixture(scope="module")
def made(blocks: Blocks) -> CalibrationFile:
    servers = dict.fromkeys(("key a", "key b"), facts("vLLM"))
    about = {"model": "trained", "shape": {"hidden_size": 64}, "kv_dtype": "auto"}
    made = chat_calibration(about, servers, blocks, MadeUpValidator(blocks), Progress())
    return checked(made, Progress(), verifications=500)


def test_every_server_and_every_kernel_is_a_population(made: CalibrationFile) -> None:
    names = [each.facts.name for each in made.populations]
    assert names == ["vLLM", "vLLM (2)", *KERNELS]
    assert [each.facts.emulated for each in made.populations] == [False, False, True, True, True]
    assert [len(each.figures.lengths) for each in made.populations] == [96, 96, 192, 192, 192]
    assert made.references == (REFERENCE, "rough")
    assert (made.version, made.scheme, made.seq_len, made.k_dim) == (4, "receipt-v1", 16, K_DIM)
    assert (made.block_hash, made.public_key, made.kv_dtype) == ("", "", "auto")
    assert CalibrationFile.model_validate_json(made.model_dump_json()) == made


def test_figures_stand_beside_our_own_of_the_same_block(
    made: CalibrationFile, blocks: Blocks
) -> None:
    conversations = blocks.conversations()
    assert made.groups is not None
    assert len(made.own(REFERENCE).lengths) == len(made.groups) == len(blocks)
    for population, server in zip(made.populations, ("key a", "key b"), strict=False):
        rows = population.figures.rows
        assert rows is not None
        for row, length in zip(rows, population.figures.lengths, strict=True):
            of = blocks.answers[made.groups[row]]
            assert of.scheme.key == server
            numbers = [n for n, group in conversations.items() if group == made.groups[row]]
            theirs = blocks.vectors({made.groups[row]: noise(server, of.name, ROUNDED)}, numbers)
            lengths = np.linalg.norm(theirs, axis=1)
            # Less what float16 on the wire rounds.
            assert np.isclose(lengths, length, rtol=0.01).any()


def test_suspects_are_measured_on_blocks_of_all_servers(made: CalibrationFile) -> None:
    for population in made.populations[:2]:
        assert {len(each) for each in population.figures.cosines.values()} == {96}
        assert all(abs(np.mean(each)) < 0.1 for each in population.figures.cosines.values())
    reaches = made.honest(REFERENCE).reaches
    moved = {name: round(math.exp(of.log_mean)) for name, of in reaches.items()}
    assert moved == dict.fromkeys(SUSPECTS, MOVED / ROUNDED)


def test_the_footprints_of_servers_clear(made: CalibrationFile) -> None:
    kept = made.honest(REFERENCE).footprints
    assert set(kept) == {"vLLM", "vLLM (2)", REFERENCE}
    assert kept["vLLM"].mean == pytest.approx(SHARED, abs=0.02)
    assert set(made.honest("rough").footprints) == {"rough"}


def test_blocks_of_one_conversation_widen_what_is_honest(made: CalibrationFile) -> None:
    apart = made.model_copy(update={"groups": list(range(len(made.groups or ())))})
    together, independent = (each.null(REFERENCE, 1.0).members[0] for each in (made, apart))
    assert np.log(together.ratios).std() > 1.3 * np.log(independent.ratios).std()


def test_the_output_names_kernels_and_the_check_without_each(made: CalibrationFile) -> None:
    lines = list(calibration_lines(made, 48))
    assert lines[0] == "48 chats, 192 blocks of 16 tokens"
    assert lines[1].startswith("vLLM (measured): errors ")
    assert re.fullmatch(
        r"fine \(emulated\): errors 0\.\d+ times, footprint 0\.5\d of rough", lines[5]
    )
    assert "left out" in lines[-1]
    assert made.left_out is not None
    assert made.left_out.convicted == {}
