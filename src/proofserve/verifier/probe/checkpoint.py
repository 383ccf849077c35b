"""A checkpoint as a probe needs it: its tokenizer, its network, and those of suspects."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from proofserve.engines.reference.errors import CheckpointError
from proofserve.engines.reference.kernels import PROFILES, own_profile, with_kernels
from proofserve.engines.reference.network import DTYPES, Network, load, weights_alone
from proofserve.engines.reference.reading import logits_of, states_of
from proofserve.engines.reference.routing import ChoiceOfExperts, ExpertMemory
from proofserve.engines.reference.suspects import suspect, suspects_of
from proofserve.rounds.errors import EngineFault
from proofserve.verifier.direction import NO_SUSPECTS
from proofserve.verifier.probe.answers import PUBLISHED, SERVED, TokensRead
from proofserve.verifier.validator import EXACT, ValidatorSetup

# In what most servers compute.
DEFAULT_SERVED = "bfloat16"


class CheckpointReader:
    """Networks that read conversations: the published one, and suspects by their ``names``.

    The published network is in memory once, in float32, and one suspect beside it: what honest
    servers compute is emulated. Suspects use the experts that the published network chose. Raises
    CheckpointError if a checkpoint cannot be used.
    """

    def __init__(self, setup: ValidatorSetup) -> None:
        served = setup.served_dtype or DEFAULT_SERVED
        own = own_profile(DTYPES[served]) if served in DTYPES else None
        if own is None:
            raise CheckpointError(
                f"--served-dtype: servers do not compute in {served}; give bfloat16 or float16"
            )
        self._others = {folder.name: folder for folder in setup.suspects}
        self._setup = setup
        self._own = own
        self._published = load(setup.model, EXACT, setup.device)
        self._experts = ExpertMemory(self._published)
        self.names = (*suspects_of(self._published), *self._others)
        if not self.names:
            raise CheckpointError(f"{setup.model}: {NO_SUSPECTS}; give --suspect")
        # One like our own would have no spread to judge others by.
        self.kernels = tuple(name for name, each in PROFILES.items() if each != own)

    @property
    def vocabulary(self) -> int:
        return int(self._published.checkpoint.head.weight.shape[0])

    def logits(
        self, name: str, conversations: Sequence[TokensRead]
    ) -> Iterator[NDArray[np.float32]]:
        """For each conversation [tokens of the answer, vocabulary]: what chose each token.

        ``name`` is PUBLISHED, SERVED or one of ``names``; PUBLISHED reads a conversation before a
        suspect does. Raises EngineFault if a forward fails or a logit is not finite.
        """
        network = self._network(name)
        experts: ChoiceOfExperts | None = None
        if name == PUBLISHED:
            experts = self._experts.recording()
        elif name != SERVED:
            experts = self._experts.holding(network)
        return _read(name, network, conversations, experts)

    def kernel_logits(
        self, kernel: str, conversations: Sequence[TokensRead]
    ) -> Iterator[NDArray[np.float32]]:
        """As ``logits``, by one of the honest ``kernels``."""
        network = with_kernels(self._published, PROFILES[kernel])
        return _read(kernel, network, conversations, None)

    def _network(self, name: str) -> Network:
        if name == PUBLISHED:
            return weights_alone(self._published)
        if name == SERVED:
            return with_kernels(self._published, self._own)
        if name in self._others:
            return load(self._others[name], EXACT, self._setup.device)
        return suspect(weights_alone(self._published), name)


def _read(
    name: str,
    network: Network,
    conversations: Sequence[TokensRead],
    experts: ChoiceOfExperts | None,
) -> Iterator[NDArray[np.float32]]:
    for each in conversations:
        states = states_of(network, each.prompt_ids, each.output_ids, experts)
        logits: NDArray[np.float32] = logits_of(network, states).cpu().numpy()
        if not np.isfinite(logits).all():
            raise EngineFault(f"{name}: the logits of an answer are not finite")
        yield logits


class CheckpointTokens:
    """The checkpoint's tokenizer. Raises CheckpointError without a usable one.

    ``size`` is the number of ids that have a logit.
    """

    def __init__(self, model: Path, size: int) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{model}: no tokenizer: {error}") from error
        self.size = size

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @cached_property
    def pieces(self) -> Mapping[str, int]:
        """The id of every text that exactly one id stands for."""
        texts = [self._tokenizer.decode([token]) for token in range(len(self._tokenizer))]
        often = Counter(texts)
        return {text: token for token, text in enumerate(texts) if often[text] == 1}

    def of_chat(self, text: str) -> tuple[int, ...]:
        """A conversation of one message, up to where the answer begins."""
        made = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )
        return tuple(made["input_ids"])

    def of_completion(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text))

    def of_answer(self, text: str) -> tuple[int, ...]:
        """Without tokens that mark a beginning or an end."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def text_of(self, ids: Sequence[int]) -> str:
        """Without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
