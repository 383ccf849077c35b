"""A checkpoint as a probe needs it: its tokenizer, its network, and those of suspects."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from proofserve.engines.reference.errors import CheckpointError
from proofserve.engines.reference.network import Network, load
from proofserve.engines.reference.reading import logits_of, states_of
from proofserve.engines.reference.routing import ExpertMemory
from proofserve.engines.reference.suspects import SUSPECTS, suspect
from proofserve.lab.probe.ports import PUBLISHED, SERVED
from proofserve.lab.probe.records import TokensRead
from proofserve.rounds.errors import EngineFault
from proofserve.wiring.validator import ValidatorSetup

# A probe's own network must round less than the endpoint's.
EXACT = "float32"


class CheckpointReader:
    """Implements ``lab.probe.ports.LogitReader``.

    The published network is in memory twice, in float32 and as served, and one suspect beside them.
    Suspects use the experts that the published network chose, so it reads a conversation first.
    Raises CheckpointError if a checkpoint cannot be used.
    """

    def __init__(self, setup: ValidatorSetup) -> None:
        others = {folder.name: folder for folder in setup.suspects}
        self.names = (*SUSPECTS, *others)
        self._setup = setup
        self._others = others
        self._published = load(setup.model, EXACT, setup.device)
        self._experts = ExpertMemory(self._published)
        self._served = load(setup.model, setup.served_dtype, setup.device)
        if self._served.dtype == self._published.dtype:
            raise CheckpointError(
                f"--served-dtype: servers do not compute in {EXACT}; give bfloat16 or float16"
            )

    @property
    def vocabulary(self) -> int:
        head: Any = self._published.head
        return int(head.weight.shape[0])

    def logits(
        self, name: str, conversations: Sequence[TokensRead]
    ) -> Iterator[NDArray[np.float32]]:
        network = self._network(name)
        for each in conversations:
            # Not around the loop: who takes a result may let another network read before the next.
            with self._routing(name, network):
                states = states_of(network, each.prompt_ids, each.output_ids)
            logits: NDArray[np.float32] = logits_of(network, states).cpu().numpy()
            if not np.isfinite(logits).all():
                raise EngineFault(f"{name}: the logits of an answer are not finite")
            yield logits

    def _routing(self, name: str, network: Network) -> AbstractContextManager[object]:
        if name == SERVED:
            return nullcontext()
        return self._experts.recording() if name == PUBLISHED else self._experts.holding(network)

    def _network(self, name: str) -> Network:
        if name in {PUBLISHED, SERVED}:
            return self._published if name == PUBLISHED else self._served
        if name in self._others:
            return load(self._others[name], EXACT, self._setup.device)
        return suspect(self._published, name)


class CheckpointTokens:
    """Implements ``lab.probe.ports.Tokens``. Raises CheckpointError without a usable tokenizer.

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
        texts = [self._tokenizer.decode([token]) for token in range(len(self._tokenizer))]
        often = Counter(texts)
        return {text: token for token, text in enumerate(texts) if often[text] == 1}

    def of_chat(self, text: str) -> tuple[int, ...]:
        made = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )
        return tuple(made["input_ids"])

    def of_completion(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text))

    def of_answer(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def text_of(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
