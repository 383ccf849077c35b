"""Nodes over real HTTP for ``proofserve validate``: they share networks, and may be held up."""

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path

from cli.challenged import VALIDATOR, ModelEngine
from proofserve.cli.main import app
from proofserve.engines.reference.kernels import PROFILES
from proofserve.engines.reference.network import load, with_kernels
from proofserve.rounds.records import Deferred, ProofBatch, Workload
from support.committed import FakeNode, fake_node
from support.fake_engine import FakeEngine
from support.four_bits import one_thread
from support.pace import until
from support.reference import Prover
from support.small_bank import small_bank

KEY_VARIABLE = "KEY_OF_NODES"
# What the nodes say they run on, and so their one kernel.
PROCESSOR, KERNEL = "a processor with bfloat16", "vLLM on x86 with bfloat16"
# What a validator imports. The process that has done so forks each one that a test starts.
IMPORTED = ("torch", "transformers", "proofserve.cli.validator.validate")
IMPORTED += ("proofserve.verifier.validator", "proofserve.verifier.validation.judging")


def validator_process(file: Path, said: Path) -> BaseProcess:
    """``proofserve validate FILE`` with few kernels and suspects; ``said`` gets its output."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([*IMPORTED])
    process = forks.Process(target=_validate, args=(file, said))
    process.start()
    return process


def _validate(file: Path, said: Path) -> None:
    os.environ[KEY_VARIABLE] = VALIDATOR
    with (
        said.open("w") as out,
        redirect_stdout(out),
        redirect_stderr(out),
        small_bank(),
        one_thread(),
    ):
        app(["validate", str(file)])


class HeldEngine(ModelEngine):
    """Computes by the networks of another engine, once it is ``free``; notes what it is asked."""

    def __init__(self, like: ModelEngine) -> None:
        FakeEngine.__init__(self, like.engine_info)
        self.honest, self.four_bits = like.honest, like.four_bits
        self.serves, self.free = like.honest, True
        self.asked: list[Workload] = []

    async def answer(
        self, work: Workload, nonces: Sequence[int], core: int = 0
    ) -> ProofBatch | Deferred:
        self.asked.append(work)
        await until(lambda: self.free, 600.0)
        return await super().answer(work, nonces, core)


ServedNode = tuple[FakeNode, HeldEngine]


@contextmanager
def nodes_of(model: Path, folder: Path, names: Sequence[str]) -> Iterator[Mapping[str, ServedNode]]:
    engine, found = ModelEngine(model, PROCESSOR), {}
    engine.honest = Prover(with_kernels(load(model, "float32", "cpu"), PROFILES[KERNEL]))
    with ExitStack() as stack:
        for name in names:
            own = folder / name
            own.mkdir(parents=True)
            held = HeldEngine(engine)
            settings = {"validator_key": VALIDATOR, "challenge_nonces_per_hour": 10_000}
            node = fake_node(own, held, None, api_key="operators-key", **settings)
            found[name] = stack.enter_context(node), held
        yield found


def nodes_toml(
    folder: Path, models: Mapping[str, Mapping[str, str]], about: str, **validate: object
) -> Path:
    """The file of nodes, URLs by name, of each model; ``about`` are lines of every model."""
    lines = ["[validate]", *(f"{name} = {value!r}" for name, value in validate.items())]
    for model, nodes in models.items():
        lines += [f"[models.{model}]", about.format(model=model)]
        for name, url in nodes.items():
            lines += [f"[nodes.{name}]", f"url = {url!r}", f"model = {model!r}"]
            lines.append(f"key_env = {KEY_VARIABLE!r}")
    file = folder / "nodes.toml"
    file.write_text("\n".join(lines))
    return file
