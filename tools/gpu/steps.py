"""The steps of ``make gpu``: what each runs, what it needs, and how long it may take.

The order is that of their worth: if the time ends early, the first steps have their results.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from proofserve.engines.vetting.features import vetting_of
from proofserve.host import HostFacts

CLI = (sys.executable, "-m", "proofserve")
V1, V2 = ({"VLLM_USE_V2_MODEL_RUNNER": value} for value in ("0", "1"))


@dataclass(frozen=True, slots=True)
class Scale:
    """The sizes of a run. ``FULL`` is for a card, ``SHORT`` for a processor, in seconds a step.

    ``model`` is a short name of ``proofserve bench reference`` or a folder; ``size`` is that of the
    speed measurements, ``noise_size`` of those that also run on the processor.
    """

    size: str
    noise_size: str
    noise: Sequence[str]
    reference: Sequence[str]
    profile: Sequence[str]
    rows: int
    served: Mapping[str, Sequence[str]]
    audit: Sequence[str]


FULL = Scale(
    size="0.6b",
    noise_size="small",
    noise=("--nonces", "400", "--bank", "0"),
    reference=(
        *("--seq-len", "64", "--seq-len", "256"),
        *("--batch", "32", "--batch", "128", "--batch", "512", "--batch", "1024"),
    ),
    profile=("--batch", "128", "--seq-len", "64", "--seq-len", "256", "--repeats", "10"),
    rows=4096,
    served={
        "generation": ("--seq-len", "256", "--batch", "128", "--windows", "20", "--seconds", "2"),
        "chat": ("--batch", "128", "--chats", "50", "--windows", "10", "--seconds", "2"),
        "same-batch": ("--batch", "64", "--clients", "64", "--windows", "6", "--seconds", "4"),
    },
    audit=("--quick",),
)
SHORT = Scale(
    size="tiny",
    noise_size="tiny",
    noise=(
        *("--nonces", "48", "--emulated", "16", "--bank", "0", "--seq-len", "8"),
        *("--verifications", "100"),
    ),
    reference=("--seq-len", "8", "--batch", "2", "--batch", "4", "--seconds", "0.1"),
    profile=("--batch", "2", "--seq-len", "8", "--repeats", "2"),
    rows=32,
    served={
        "generation": ("--seq-len", "16", "--batch", "8", "--windows", "1", "--seconds", "1"),
        "chat": (
            *("--seq-len", "16", "--batch", "8", "--chats", "2", "--clients", "4"),
            *("--windows", "1", "--seconds", "3"),
        ),
        "same-batch": (
            *("--seq-len", "16", "--batch", "8", "--clients", "4"),
            # Long enough for proofs of a share of the time, also where other programs run.
            *("--windows", "1", "--seconds", "4"),
        ),
    },
    audit=(
        *("--quick", "--nonces", "12", "--seq-len", "32", "--forward-batch", "12"),
        *("--verifications", "100"),
    ),
)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """``device`` is cuda or cpu. ``url`` names a running node instead of servers of our own.

    ``model`` is its checkpoint, or the one that is served; None for a small one of the package.
    """

    device: str
    folder: Path
    scale: Scale = FULL
    model: str | None = None
    url: str | None = None

    @property
    def checkpoint(self) -> str:
        return self.model or "qwen"


@dataclass(frozen=True, slots=True)
class Step:
    """One process. ``cards`` is how many it needs; with ``served`` it needs vLLM or a URL.

    ``packages`` are those it imports, None for all that proofserve requires. ``finds``: exit codes
    beside 0 of a step that ran and wrote its record.
    """

    name: str
    title: str
    argv: Sequence[str]
    limit_s: float
    packages: Sequence[str] | None = None
    cards: int = 1
    served: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    finds: tuple[int, ...] = ()


def all_steps(run: RunOptions) -> list[Step]:
    """Every step on ``run.device``, in the order in which they run."""
    found = [*_exact(run), *_whole(run), *_reference(run), *_noise(run), *_served(run)]
    return found if run.device == "cuda" else [replace(step, cards=0) for step in found]


def lack(step: Step, run: RunOptions, host: HostFacts | None) -> str | None:
    """Why ``step`` cannot run on this host; None if it can, or if the host is not known."""
    if host is None:
        return None
    if missing := _missing(step, host):
        return f"not installed: {' '.join(missing)}; see docs/gpu.md"
    if step.cards > len(host.torch.cards):
        return _too_few(step, host)
    if step.name == "pick-order" and run.device == "cpu":
        return "a processor's torch.topk has an order of its own, which nothing uses"
    if step.name.startswith("noise-vllm") and run.url is not None and run.model is None:
        return "the node is compared with its checkpoint: name that with --model"
    return _no_server(step, run, host) if step.served and run.url is None else None


def _no_server(step: Step, run: RunOptions, host: HostFacts) -> str | None:
    if host.vllm is None:
        return "vLLM is not installed"
    if run.device == "cuda" and host.vllm_for_cpu:
        return f"vLLM {host.vllm} is a build for processors"
    if step.env == V2 and (why := _no_second_runner(run, host.vllm)) is not None:
        return why
    if not host.plugin:
        return "vLLM would not load proofserve: it is not installed as a package"
    return None


def _no_second_runner(run: RunOptions, vllm: str) -> str | None:
    if run.device == "cpu":
        return "the second model runner needs Triton, which has no compiler for processors"
    row = vetting_of(vllm)
    if row is not None and "V2" not in row.runners:
        return f"proofs were not vetted on the second model runner of vLLM {row.minor}"
    return None


def _missing(step: Step, host: HostFacts) -> list[str]:
    return [name for name in host.missing if step.packages is None or name in step.packages]


def _too_few(step: Step, host: HostFacts) -> str:
    if not host.torch.cards:
        return f"no card: {host.torch.problem}"
    return f"needs {step.cards} cards, and this host has {len(host.torch.cards)}"


def _file(run: RunOptions, name: str) -> str:
    return str(run.folder / name)


def _own(module: str, run: RunOptions, name: str, *args: str) -> tuple[str, ...]:
    """A module of this package; it writes its record to the step's file."""
    out = ("--json", _file(run, f"{name}.json"))
    return (sys.executable, "-m", f"gpu.{module}", *args, *out)


def _exact(run: RunOptions) -> Iterator[Step]:
    device, scale = ("--device", run.device), run.scale
    tests = ("torch", "transformers", "scipy", "pytest", "safetensors", "numpy")
    yield Step(
        "golden",
        "golden vectors: every case of every scheme",
        _own("golden", run, "golden", *device),
        120,
        tests,
        env={"GOLDEN_DEVICE": run.device},
    )
    yield Step(
        "pick-order",
        "the pick order of artifact-v1 against torch.topk (ADR 7)",
        _own("pick_order", run, "pick-order", *device, "--rows", str(scale.rows)),
        90,
        ("torch", "numpy"),
    )


def _whole(run: RunOptions) -> Iterator[Step]:
    if run.url is None:
        argv = _own("vllm_files", run, "vllm")
        yield Step("vllm", "vLLM: whole, with all that it imports", argv, 300, (), served=True)


def _reference(run: RunOptions) -> Iterator[Step]:
    scale = run.scale
    model = (run.checkpoint, "--size", scale.size)
    yield Step(
        "models",
        "writing the checkpoints that the next steps load",
        _own("checkpoints", run, "models", run.checkpoint, *_sizes(scale)),
        240,
        ("torch", "transformers", "safetensors", "typer", "rich"),
    )
    yield Step(
        "reference",
        "reference engine: nonces a second, and its share of bare multiplications",
        (
            *(*CLI, "bench", "reference", *model, "--device", run.device),
            *(*scale.reference, "--json", _file(run, "reference.json")),
        ),
        180,
    )
    yield Step(
        "profile",
        "one forward: shares of inputs, model and finish",
        _own("forward_profile", run, "profile", *model, "--device", run.device, *scale.profile),
        120,
        ("torch", "transformers", "safetensors", "numpy", "typer", "rich"),
    )


def _sizes(scale: Scale) -> tuple[str, ...]:
    return tuple(dict.fromkeys((scale.size, scale.noise_size)))


def _noise(run: RunOptions) -> Iterator[Step]:
    """What honest kernels show: those that are emulated, and real ones beside them."""
    scale = run.scale
    model = (run.checkpoint, "--size", scale.noise_size)
    base = (*CLI, "calibrate", "noise", *model, "--device", run.device, *scale.noise)

    def command(name: str, *more: str) -> tuple[str, ...]:
        return (*base, *more, "--json", _file(run, f"{name}.json"))

    name = "noise-emulated"
    yield Step(name, f"honest kernels, emulated on {run.device}", command(name), 400)
    yield Step(
        "audit",
        "audit: which attacks would validators on this device notice",
        (
            *(*CLI, "audit", *model, "--device", run.device, *scale.audit),
            *("--json", _file(run, "audit.json"), "--html", _file(run, "audit.html")),
        ),
        180,
        # An attack that it does not catch says nothing against this host.
        finds=(1,),
    )
    for name, title, engine, env, cards in (
        ("noise-vllm-v1", "vLLM, first model runner", "vllm", V1, 1),
        ("noise-vllm-v2", "vLLM, second model runner", "vllm", V2, 1),
        ("noise-vllm-tp2", "vLLM on two cards", "vllm:tp2", {}, 2),
    ):
        # A running node has the runner that it was started with.
        argv = command(name, "--other", run.url or engine)
        yield Step(
            name, f"{title}, and emulated kernels", argv, 400, cards=cards, served=True, env=env
        )


def _served(run: RunOptions) -> Iterator[Step]:
    at = ("--url", run.url) if run.url else ("--model", run.checkpoint, "--size", run.scale.size)
    for name, kind, title, more in (
        ("generation", "generation", "vLLM: a round beside bare forwards and prefill", ()),
        ("chat-priority", "chat", "vLLM: chat beside proofs, eager", ()),
        ("chat-graphs", "chat", "vLLM: chat beside proofs, with CUDA graphs", ("--graphs",)),
        ("same-batch", "same-batch", "vLLM: proofs in chat's batch against dedicated ones", ()),
    ):
        yield Step(
            name,
            title,
            _own("served", run, name, kind, *at, *run.scale.served[kind], *more),
            300,
            served=True,
            # A figure of one window of a second may break its limit on a busy machine.
            finds=(1,) if run.scale is SHORT else (),
        )
