"""The API process's side of receipts: a vLLM engine as ``rounds.ports.AnsweringEngine``."""

import asyncio
import logging
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import numpy as np

from proofserve.engines.receipts.compat_answers import EndedAnswer, RequestNotes
from proofserve.engines.vllm import compat_client
from proofserve.engines.vllm.support import require_receipts
from proofserve.protocol.receipts.record import FinishedAnswer
from proofserve.protocol.receipts.sketches import ReceiptScheme
from proofserve.rounds.records import EngineInfo

_logger = logging.getLogger(__name__)

START = "proofserve_receipts_start"
ANSWERS = "proofserve_receipts_answers"
# Rows that a worker keeps at most: 64 MiB with 32 dimensions.
MOST_ROWS = 1 << 20
# The completions API numbers the prompts of a request, and the responses API its rounds.
_NUMBERED = re.compile(r"(cmpl-.*)-(\d+)|(resp_.*)_(\d+)", re.DOTALL)


class VllmAnswers:
    """An ``AnsweringEngine``, made by ``start``."""

    def __init__(
        self, engine_client: Any, engine_info: EngineInfo, sketch_key: str, k_dim: int
    ) -> None:
        self.engine_info, self.sketch_key, self.k_dim = engine_info, sketch_key, k_dim
        self._client = engine_client
        self._notes = RequestNotes(engine_client)
        self._one_call = asyncio.Lock()
        # The open call to each core, and how many answers the core has dropped.
        self._calls: dict[int, asyncio.Task[dict[str, Any]]] = {}
        self._dropped: Counter[int] = Counter()

    async def finished_answers(self) -> list[FinishedAnswer]:
        """See ``rounds.ports.AnsweringEngine``; answers of one engine core keep their order.

        Raises EngineGone, and EngineFault.
        """
        answers: list[FinishedAnswer] = []
        async with self._one_call:
            while not answers:
                for core in range(compat_client.core_count(self._client)):
                    if core not in self._calls:
                        call = compat_client.call_engine(self._client, ANSWERS, core=core)
                        self._calls[core] = asyncio.create_task(call)
                answers = self._taken(await self._ended())
        return answers

    async def _ended(self) -> list[int]:
        """Cores whose call has ended, at least one. A cancelled caller ends all calls."""
        try:
            await asyncio.wait(self._calls.values(), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            for call in self._calls.values():
                call.cancel()
            self._calls.clear()
            raise
        return [core for core, call in self._calls.items() if call.done()]

    def _taken(self, cores: Sequence[int]) -> list[FinishedAnswer]:
        """The answers in the replies of ``cores``. Raises the first error if there are none."""
        answers: list[FinishedAnswer] = []
        errors: list[BaseException] = []
        for core in cores:
            call = self._calls.pop(core)
            if error := call.exception():
                errors.append(error)
                continue
            reply = call.result()
            if count := reply["dropped"] - self._dropped[core]:
                self._dropped[core] += count
                text = "%d answers get no receipt: they were not collected in time"
                _logger.warning(text, count)
            answers += [self._finished(EndedAnswer.from_wire(wire)) for wire in reply["answers"]]
        if errors and not answers:
            raise errors[0]
        return answers

    def _finished(self, ended: EndedAnswer) -> FinishedAnswer:
        stopped_after, siblings = self._notes.take(ended.request_id)
        response_id, choice = response_of(ended.external_id, ended.request_id, siblings)
        sketches = ended.sketches
        if sketches is not None and stopped_after is not None:
            # A float16 has two bytes.
            sketches = sketches[: 2 * self.k_dim * stopped_after]
        return FinishedAnswer(
            response_id=response_id,
            choice=choice,
            adapter=ended.adapter,
            sampling=ended.sampling,
            prompt_ids=tuple(np.frombuffer(ended.prompt, "<u4").tolist()),
            # A stop string ends what the client gets; the engine may have gone on for a step.
            output_ids=tuple(np.frombuffer(ended.output, "<u4")[:stopped_after].tolist()),
            sketch_key=self.sketch_key,
            k_dim=self.k_dim,
            sketches=sketches,
            finish_reason=ended.finish_reason if stopped_after is None else "stop",
            created_ms=ended.created_ms,
        )


async def start(engine_client: Any, engine_info: EngineInfo, k_dim: int) -> VllmAnswers:
    """Tap the engine under a new sketch key. Call it once, before the first request.

    Raises ValueError for options that receipts do not support, EngineFault if the engine cannot be
    tapped, and EngineGone.
    """
    require_receipts(engine_client.vllm_config)
    digest = engine_info.facts.weights_digest
    if digest is None:
        raise ValueError("POC_RECEIPTS needs a checkpoint with safetensors files")
    key = f"{datetime.now(UTC):%Y-%m-%d}-{secrets.token_hex(16)}"
    scheme = asdict(ReceiptScheme(key, digest, k_dim))
    for core in range(compat_client.core_count(engine_client)):
        await compat_client.call_engine(engine_client, START, scheme, MOST_ROWS, core=core)
    return VllmAnswers(engine_client, engine_info, key, k_dim)


def response_of(external_id: str, request_id: str, siblings: int) -> tuple[str, int]:
    """The id of the response that the client got, and the index of its choice.

    ``request_id`` is ``external_id`` with a random end, for ``siblings`` above 1 after the number
    of the answer. The completions API puts the number of the prompt behind the response's id, the
    responses API that of the round, of which there are several if the server runs tools.
    """
    number = int(request_id.partition("_")[0]) if siblings > 1 else 0
    if found := _NUMBERED.fullmatch(external_id):
        return found[1] or found[3], int(found[2] or found[4]) * siblings + number
    return external_id, number
