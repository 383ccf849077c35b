"""A validator with the published checkpoint: its tokens, true vectors, honest runs, suspects."""

import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from proofserve.engines.reference.engine import ReferenceEngine, Run
from proofserve.engines.reference.forward import Chat, Passed, logits_of, states_of
from proofserve.engines.reference.kernels import (
    PROFILES,
    SERVED,
    KernelProfile,
    Point,
    by_pytorch,
    in_a_graph,
    own_profile,
)
from proofserve.engines.reference.network import Network, load, weights_alone, with_kernels
from proofserve.engines.reference.routing import ChoiceOfExperts, ExpertMemory
from proofserve.engines.reference.suspects import FP8_CACHE, suspect, suspects_of
from proofserve.reports import ReportedError
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import ProofBatch, Workload
from proofserve.verifier.calibration_file import (
    KV_AUTO,
    CalibrationFile,
    KernelFacts,
    checkpoint_shape,
)
from proofserve.verifier.claims import BY_PYTORCH
from proofserve.verifier.judges import OWN, PUBLISHED, BankRun, Variant, Vectors, as_sent
from proofserve.verifier.verification import Truth

# What networks compute for nonces, each run for its own; they may add other nonces that they
# computed with them.
Compute = Callable[[Sequence[Run]], Sequence[ProofBatch]]

# In which the published vectors are computed, for every test and whatever the checkpoint has:
# errors must not contain the validator's own rounding.
EXACT: Final = "float32"
# Keys and values in the dtype that is served, or in 8 bits.
KV_FP8: Final = "fp8"
KV_DTYPES: Final = (KV_AUTO, KV_FP8)
# Of a checkpoint whose layers are read from disk again for each pass.
NONCES_OF_A_PASS: Final = 32
# Devices that share each layer of a server, where several do.
_RANKS: Final = (2, 4, 8)
# Kernels that are honest where a validator allows such a cache; and where a checkpoint declares
# that activations are rounded: those of a server that decodes the weights and does not.
_FP8_CACHE: Final = "with a cache in fp8"
IN_FULL: Final = "with activations in full"
# A token of harmony, the format of gpt-oss: the name of an answer's next part follows.
HARMONY_MARK: Final = "<|channel|>"


def _unheard(_index: int, _of: int) -> None:
    """No one waits for a layer."""


def proofs_of(work: Workload, forward_batch: int, passed: Passed = _unheard) -> Compute:
    """For ``work``; ``passed`` hears of each layer, counted from 1, and how many there are."""
    return partial(ReferenceEngine(forward_batch, passed).compute_all, work)


def _no_nonces(_runs: object) -> NoReturn:
    raise AssertionError("this validator was made without nonces")


@dataclass(frozen=True, slots=True)
class ValidatorSetup:
    """``served_dtype`` is that of honest nodes, None for the checkpoint's own.

    ``suspects`` are checkpoints beside the bank that is made from ``model``. With a ``kv_dtype`` of
    fp8 nodes may keep keys and values so, and it is no suspect. ``unread`` is for plans: ``model``
    may be a configuration without weights.
    """

    model: Path
    device: str = "cpu"
    suspects: tuple[Path, ...] = ()
    served_dtype: str | None = None
    kv_dtype: str = KV_AUTO
    unread: bool = False

    def serving_as(self, measured: CalibrationFile | None) -> Self:
        """As honest nodes of a calibration serve; itself without one."""
        if measured is None:
            return self
        return replace(self, served_dtype=measured.served_dtype, kv_dtype=measured.kv_dtype)


class CheckpointValidator:
    """Vectors and errors of the published checkpoint and of suspects. Nothing is computed twice.

    The truth has the published weights and exact arithmetic; servers round activations too, where
    the checkpoint declares it. The validator's own honest run is emulated, as transformers would
    round: the same on every processor. Runs that are expected advance together, layer by layer.
    ``of_chat``: what is judged are states of chat, which a server that compiles has from a graph.
    ``forwards`` counts the nonces that suspects computed, ``suspects_s`` their seconds. Raises
    CheckpointError if a checkpoint cannot be used; the methods raise EngineFault.
    """

    def __init__(
        self, setup: ValidatorSetup, compute: Compute = _no_nonces, *, of_chat: bool = False
    ) -> None:
        self.forwards, self.suspects_s = 0, 0.0
        self._setup = setup
        self._compute = compute
        self._others = {folder.name: folder for folder in setup.suspects}
        self.published = load(
            setup.model, EXACT, setup.device, setup.served_dtype, unread=setup.unread
        )
        allowed = {FP8_CACHE} if setup.kv_dtype == KV_FP8 else set()
        bank = (name for name in suspects_of(self.published) if name not in allowed)
        self.names = (*bank, *self._others)
        self._exact = weights_alone(self.published)
        self._own = _own_profile(self.published)
        others = {name: each for name, each in PROFILES.items() if each != self._own}
        self._kernels = {str(OWN.kernels): self._own, **others}
        served = (n for n in SERVED if n in others and others[n].format == self._own.format)
        named = {name: self._kernels[name] for name in (str(OWN.kernels), *served)}
        if setup.kv_dtype == KV_FP8:
            # No references: what such a cache rounds away is alike in all kernels, and hides lies.
            caching = {f"{n} {_FP8_CACHE}": replace(p, fp8_cache=True) for n, p in named.items()}
            self._kernels |= caching
        if self._exact != self.published:
            in_full = {f"{n} {IN_FULL}": profile for n, profile in named.items()}
            # A declared cache in fp8 hides lies as well.
            named = in_full if self.hides_lies else named | in_full
        self._kernels |= named
        self.references = tuple(named)
        self.round_activations = self._exact != self.published
        self._experts = ExpertMemory(self.published)
        self.is_dense = self._experts.is_dense
        self.weights_digest = self.published.facts.weights_digest
        # That of the validator's own honest run, and the kernels that are emulated beside it.
        self.served_dtype, self.kernels = self._own.format, tuple(self._kernels)
        # No calibration emulates these: they are for nodes that have none of the references.
        self.variants = {name: self._add_variants(name, of_chat) for name in self.references}
        self._networks: dict[BankRun, Network] = {}
        self._known: dict[tuple[BankRun, int], NDArray[np.float32]] = {}
        self._expected: defaultdict[BankRun, set[int]] = defaultdict(set)

    def _add_variants(self, reference: str, of_chat: bool) -> dict[Variant, str]:
        profile, found = self._kernels[reference], dict[Variant, str]()
        compiling = Variant("PyTorch"), by_pytorch(profile), f"{reference}, {BY_PYTORCH}"
        if of_chat:
            compiling = Variant("compiled"), in_a_graph(profile), f"{reference}, compiled"
        # Those that cut off are also vLLM's on a processor with AVX2 alone.
        sums = (False, True) if profile.truncated & {Point.REDUCED} else (False,)
        deployed = ((1, False), *itertools.product(_RANKS, sums))
        operations = (Variant(), profile, reference), compiling
        for (of, made, name), (ranks, by_gloo) in itertools.product(operations, deployed):
            variant = replace(of, ranks=ranks, by_gloo=by_gloo)
            if made is not None and variant != Variant():
                title = f"{name} on {ranks} ranks" if ranks > 1 else name
                title += ", by gloo" if by_gloo else ""
                self._kernels[title] = replace(made, ranks=ranks, by_gloo=by_gloo)
                found[variant] = title
        return found

    @property
    def hides_lies(self) -> bool:
        """Whether servers that do as the checkpoint declares round caches to fp8."""
        return self.published.checkpoint.published.cache is not None

    def at_once(self, forward_batch: int) -> int:
        """The most nonces of a pass through the layers: from a disk fewer take as long."""
        small = self.published.checkpoint.stays_in_memory
        return forward_batch if small else max(forward_batch, NONCES_OF_A_PASS)

    def as_truth(self, width: int, forward_batch: int) -> Truth:
        """What a verdict compares with, of ``width`` values each."""
        at_once = self.at_once(forward_batch)
        return Truth(self.truth, width, at_once, self.weights_digest, self, self.is_dense)

    def truth_about(self, work: Workload, forward_batch: int, passed: Passed = _unheard) -> Truth:
        """What verdicts about ``work`` compare with; ``passed`` is as of ``proofs_of``."""
        made = self.with_other(proofs_of(work, forward_batch, passed))
        return made.as_truth(work.scheme.width, forward_batch)

    def require(
        self, measured: CalibrationFile | None, work: Workload, models: Sequence[str] = ()
    ) -> None:
        """Raise ReportedError unless a calibration's figures hold for ``work`` by this checkpoint.

        ``models`` are names that it has beside its folder's.
        """
        if measured is not None:
            folder = self._setup.model
            about = [*models, folder.name], checkpoint_shape(folder), self.weights_digest
            measured.require(work, *about, self.is_dense)

    def with_other(self, compute: Compute = _no_nonces) -> Self:
        """A validator of other nonces, with the networks that this one has loaded."""
        made = self.beside(compute)
        made._networks, made._experts = {}, ExpertMemory(self.published)
        return made

    def beside(self, compute: Compute) -> Self:
        """A validator of another node, in the same passes: the two share networks and experts."""
        made = copy.copy(self)
        made._compute, made._known, made._expected = compute, {}, defaultdict(set)
        return made

    def kernel_facts(self, kernel: str) -> KernelFacts:
        profile = self._kernels[kernel]
        return KernelFacts(
            name=kernel,
            emulated=True,
            dtype=profile.format,
            kv_dtype=KV_FP8 if profile.fp8_cache else KV_AUTO,
            ranks=profile.ranks,
            **dict.fromkeys(("engine", "processor", "torch", "attention")),
        )

    def expect(self, runs: Mapping[BankRun, Sequence[int]]) -> None:
        """Have the next computation include these runs of these nonces."""
        for run, nonces in runs.items():
            self._expected[run].update(nonces)

    def truth(self, nonces: Sequence[int]) -> Vectors:
        """The vectors of the published weights in float32, with activations as they are."""
        return self.vectors(PUBLISHED, nonces)

    def errors(self, run: BankRun, nonces: Sequence[int]) -> Vectors:
        """Of a run, as a validator sees them: both vectors rounded as on the wire."""
        made, truth = self.vectors(run, nonces), self.truth(nonces)
        return {n: as_sent(made[n]) - as_sent(truth[n]) for n in nonces}

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        """What a suspect's weights change, with the published experts. Raises CheckpointError."""
        made, truth = self.vectors(BankRun(name), nonces), self.truth(nonces)
        return {nonce: made[nonce] - truth[nonce] for nonce in nonces}

    def states(self, run: BankRun, chats: Sequence[Chat]) -> list[Tensor]:
        """For each prompt and its output float32 [tokens, hidden]: what chose each token.

        The published weights have to read an answer before a suspect does, which uses the experts
        that they chose. Raises EngineFault if a forward fails.
        """
        network = self.network(run)
        # Copies, or the states of long prompts would stay with them.
        return [each.clone() for each in states_of(network, chats, self._choice(run, network))]

    def logits(self, run: BankRun, states: Tensor) -> NDArray[np.float32]:
        """Of ``states``, [tokens, vocabulary]. Raises EngineFault if one is not finite."""
        logits: NDArray[np.float32] = logits_of(self.network(run), states).cpu().numpy()
        if not np.isfinite(logits).all():
            raise EngineFault(f"{run}: the logits of an answer are not finite")
        return logits

    def network(self, run: BankRun) -> Network:
        """What computes a run. Raises CheckpointError for a suspect that cannot be loaded."""
        if run not in self._networks:
            # Of two threads the second takes what the first has made.
            self._networks.setdefault(run, self._made_network(run))
        return self._networks[run]

    def _made_network(self, run: BankRun) -> Network:
        exact = run.kernels is None or IN_FULL in run.kernels
        weights = self._exact if exact else self.published
        if run.weights in self._others:
            other = load(self._others[run.weights], EXACT, self._setup.device)
            # The published checkpoint decides the inputs: its digest is part of every seed.
            weights = replace(other, facts=self.published.facts)
        elif run.weights is not None:
            weights = suspect(weights, run.weights)
        if run.kernels is None:
            return weights
        return with_kernels(weights, replace(self._kernels[run.kernels], order=run.order))

    def _choice(self, run: BankRun, network: Network) -> ChoiceOfExperts | None:
        """A suspect without roundings is compared with the published weights, expert by expert."""
        if run == PUBLISHED:
            return self._experts.recording()
        return self._experts.holding(network) if run.kernels is None else None

    def vectors(self, run: BankRun, nonces: Sequence[int]) -> Vectors:
        """The vectors of a run, computed with all that is expected if one is not known yet."""
        if any((run, nonce) not in self._known for nonce in nonces):
            self.expect({run: nonces})
            self._compute_expected()
        return {nonce: self._known[run, nonce] for nonce in nonces}

    def _compute_expected(self) -> None:
        expected, self._expected = self._expected, defaultdict(set)
        # The published weights come first: others may hold the experts that they choose.
        wanted = {PUBLISHED: set[int](), **expected}
        wanted[PUBLISHED] = set[int]().union(*expected.values())
        runs: dict[BankRun, Run] = {}
        for run, nonces in wanted.items():
            missing = [nonce for nonce in sorted(nonces) if (run, nonce) not in self._known]
            if not missing:
                continue
            network = self.network(run)
            runs[run] = Run(network, missing, self._choice(run, network))
            if run.weights is not None and run.kernels is None:
                self.forwards += len(missing)
        batches = self._compute([*runs.values()])
        for (run, done), batch in zip(runs.items(), batches, strict=True):
            if batch.failed:
                raise EngineFault(f"{run}: the vector of nonce {batch.failed[0]} is not finite")
            if run.weights is not None:
                self.suspects_s += done.seconds
            rows = zip(batch.nonces, batch.values, strict=True)
            self._known |= {(run, nonce): vector for nonce, vector in rows}


def size_of(folder: Path) -> int:
    """Bytes of a checkpoint's weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


class CheckpointTokenizer:
    """The checkpoint's tokenizer and chat template. Raises ReportedError if it cannot be loaded.

    ``end_ids`` end an answer and do not show in its text; ``tells_time`` says that the template
    writes the date into prompts, ``has_channels`` that answers have parts, of which servers leave
    out some and join others. Ids below ``size`` have a logit.
    """

    def __init__(self, folder: Path, size: int = 2**32) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ReportedError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
        self.size = size
        self.end_ids = _end_ids(folder, self._tokenizer.eos_token_id)
        self.has_chat_template = bool(self._tokenizer.chat_template)
        self.tells_time = "strftime_now" in str(self._tokenizer.chat_template)
        self.has_channels = HARMONY_MARK in self._tokenizer.get_vocab()

    @cached_property
    def pieces(self) -> Mapping[str, int]:
        """The id of every text that exactly one id stands for."""
        texts = [self._tokenizer.decode([token]) for token in range(len(self._tokenizer))]
        often = Counter(texts)
        return {text: token for token, text in enumerate(texts) if often[text] == 1}

    def prompt_ids(self, request: Mapping[str, Any]) -> tuple[int, ...]:
        """The ids of a request's prompt. Raises ReportedError if its fields make none."""
        prompt = request.get("prompt")
        if isinstance(prompt, str):
            return tuple(self._tokenizer(prompt)["input_ids"])
        if isinstance(prompt, list) and prompt and all(isinstance(each, int) for each in prompt):
            return tuple(prompt)
        if not isinstance(request.get("messages"), list):
            raise ReportedError("request: it has neither messages nor one prompt")
        try:
            made = self._tokenizer.apply_chat_template(
                request["messages"],
                tools=request.get("tools"),
                chat_template=request.get("chat_template"),
                add_generation_prompt=request.get("add_generation_prompt", True),
                continue_final_message=request.get("continue_final_message", False),
                tokenize=True,
                return_dict=True,
                **(request.get("chat_template_kwargs") or {}),
            )
        # A template is a program in the checkpoint, and raises what it likes.
        except Exception as error:
            text = f"messages: the checkpoint's chat template refuses them: {error}"
            raise ReportedError(text) from error
        return tuple(made["input_ids"])

    def answer_ids(self, text: str) -> tuple[int, ...]:
        """Without tokens that mark a beginning or an end."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, ids: tuple[int, ...]) -> str:
        """The text of an answer's ids, without special tokens."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **options))


def _end_ids(folder: Path, of_tokenizer: int | None) -> tuple[int, ...]:
    """The tokens that end an answer: of ``generation_config.json``, and the tokenizer's own."""
    try:
        stated = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except OSError:
        stated = None
    several = stated if isinstance(stated, list) else [stated]
    return tuple(dict.fromkeys(each for each in (*several, of_tokenizer) if each is not None))


def _own_profile(published: Network) -> KernelProfile:
    """Raises ReportedError for a dtype in which no server rounds."""
    served = published.checkpoint.served_dtype
    if (profile := own_profile(served)) is None:
        raise ReportedError(
            f"served_dtype: servers do not round in {str(served)[6:]}; give bfloat16 or float16"
        )
    return profile
