"""The API process's side: vLLM's engine client as a ``rounds.ports.ProofEngine``."""

import asyncio
import logging
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from proofserve.engines.checkpoints import checkpoint_folder, model_facts
from proofserve.engines.liveness.memory import CoreMemory, MemoryAddress
from proofserve.engines.liveness.watch import CoreView, LivenessWatch
from proofserve.engines.vllm import compat_client, core_messages
from proofserve.engines.vllm.core_messages import ProveCall
from proofserve.protocol.scheme import ModelFacts
from proofserve.rounds.errors import EngineFault, EngineGone
from proofserve.rounds.ports import Prove
from proofserve.rounds.records import (
    PYTORCH_OPS,
    VLLM_OPS,
    Deferred,
    EngineInfo,
    ProofBatch,
    Workload,
)
from proofserve.rounds.status import EngineGauges, over_cores

_logger = logging.getLogger(__name__)

# The methods that ``plugin.general`` adds to the engine core.
PROVE = "proofserve_prove"
RELEASE = "proofserve_release"
GAUGES = "proofserve_gauges"
MEASURE = "proofserve_measure"
TAKE_OVER = "proofserve_take_over"
LIVENESS = "proofserve_liveness"
# Calls that a session remembers until they end; another core may have taken the older ones.
MOST_PARTS = 16


class VllmEngine:
    """A vLLM async engine, served or embedded in the caller's own process.

    ``defer_s``: how long, in seconds, a call may wait for chat inside the engine before the engine
    answers ``Deferred``. ``timeout_s``: how many seconds more the answer may take before the call
    counts as failed. ``open_calls`` counts the proof calls that each core has not answered.
    """

    def __init__(
        self, engine_client: Any, engine_info: EngineInfo, defer_s: float, timeout_s: float
    ) -> None:
        self.engine_info = engine_info
        self.open_calls: Counter[int] = Counter()
        self._client = engine_client
        self._defer_s = defer_s
        self._timeout_s = timeout_s
        # Sessions without a core of their own begin on one core after the other.
        self._turn = 0

    @property
    def cores(self) -> int:
        return compat_client.core_count(self._client)

    @asynccontextmanager
    async def session(self, work: Workload, core: int | None = None) -> AsyncIterator[Prove]:
        """A lease; it is taken by the first call and returned at the context's end."""
        stays = core is not None
        if core is None:
            core, self._turn = self._turn % self.cores, self._turn + 1
        session = VllmSession(self, work, core, stays)
        try:
            yield session.prove
        finally:
            # Shielded: a cancelled round must still give its blocks back.
            await asyncio.shield(session.release())

    async def gauges(self) -> EngineGauges:
        replies = await self._call_all(GAUGES)
        lists = ("resume_ms", "forward_counts")
        return over_cores(
            [EngineGauges(**{**each, **{n: tuple(each[n]) for n in lists}}) for each in replies]
        )

    async def fit(self, work: Workload) -> None:
        """See ``ProofEngine.fit``: a call without nonces does it, on each core for itself."""
        call = call_for(work, self.engine_info.facts, uuid.uuid4().hex, (), defer_s=0.0)
        for reply in await self._call_all(PROVE, call):
            read_reply((), reply)

    async def measure(
        self, work: Workload, nonces: Sequence[int], forwards: int
    ) -> tuple[int, float]:
        """See ``rounds.ports.Measure``. It has no time limit.

        All cores run ``forwards`` forwards at the same time, and the slowest one counts.
        """
        call = call_for(work, self.engine_info.facts, uuid.uuid4().hex, nonces, self._defer_s)
        measured = await self._call_all(MEASURE, call, forwards)
        seconds = max(each["seconds"] for each in measured)
        return sum(each["nonces"] for each in measured), seconds

    async def take_over(self) -> None:
        """End the calls and leases of an API process that owned the proofs before this one.

        Raises EngineFault and EngineGone.
        """
        await self._call_all(TAKE_OVER)

    async def _call_all(self, method: str, *args: Any) -> list[Any]:
        """The answers of all cores, in their order."""
        calls = (self.call(method, *args, core=core) for core in range(self.cores))
        return await asyncio.gather(*calls)

    async def call(self, method: str, *args: Any, core: int = 0) -> Any:
        """Call a method of one engine core. Raises EngineFault or EngineGone."""
        return await compat_client.call_engine(self._client, method, *args, core=core)

    async def prove(
        self, work: Workload, lease: str, nonces: Sequence[int], core: int
    ) -> dict[str, Any]:
        """One ``prove`` call and its reply. Raises EngineFault, also when none came in time."""
        call = call_for(work, self.engine_info.facts, lease, nonces, self._defer_s)
        self.open_calls[core] += 1
        try:
            async with asyncio.timeout(self._defer_s + self._timeout_s):
                return dict(await self.call(PROVE, call, core=core))
        except TimeoutError:
            raise EngineFault(
                f"the engine did not answer within {self._timeout_s:g} s; raise "
                "POC_RPC_TIMEOUT_MS or lower the batch size"
            ) from None
        finally:
            self.open_calls[core] -= 1


class VllmSession:
    """Calls to ``core``. A session that does not ``stay`` goes to the next core when chat defers.

    Only the cores that were called have a lease.
    """

    def __init__(self, engine: VllmEngine, work: Workload, core: int, stays: bool) -> None:
        self._engine = engine
        self._work = work
        self._core, self._stays = core, stays
        self._called: set[int] = set()
        self._lease = uuid.uuid4().hex
        # The finished parts of calls that have not ended, by the nonces of the call.
        self._parts: OrderedDict[tuple[int, ...], list[ProofBatch]] = OrderedDict()

    async def prove(self, nonces: Sequence[int]) -> ProofBatch | Deferred:
        wanted = tuple(nonces)
        parts = self._parts.setdefault(wanted, [])
        self._parts.move_to_end(wanted)
        if len(self._parts) > MOST_PARTS:
            self._parts.popitem(last=False)
        while rest := wanted[sum(len(part.nonces) + len(part.failed) for part in parts) :]:
            core = self._core
            self._called.add(core)
            reply = await self._engine.prove(self._work, self._lease, rest, core)
            outcome = read_reply(rest, reply)
            if isinstance(outcome, Deferred):
                if not self._stays:
                    self._core = (core + 1) % self._engine.cores
                return outcome
            parts.append(outcome)
        self._parts.pop(wanted, None)
        return ProofBatch(
            nonces=tuple(nonce for part in parts for nonce in part.nonces),
            values=np.concatenate([part.values for part in parts]),
            failed=tuple(nonce for part in parts for nonce in part.failed),
        )

    async def release(self) -> None:
        """Return the leases. If that fails, the engine takes them back after its idle time."""
        for core in self._called:
            with suppress(EngineFault, EngineGone):
                await self._engine.call(RELEASE, self._lease, core=core)


async def watch_of(engine_client: Any, engine: VllmEngine, limit_s: float) -> LivenessWatch:
    """The watch of all cores of ``engine``. Raises EngineFault and EngineGone."""
    cores: list[CoreView | None] = []
    for core in range(engine.cores):
        address = MemoryAddress(**await engine.call(LIVENESS, core=core))
        try:
            cores.append(CoreView(core, address, CoreMemory.of_core(address)))
        except OSError as error:
            text = "engine core %d cannot be watched, so that a hang of it is not noticed: %s"
            _logger.warning(text, core, error)
            cores.append(None)

    def unfinished() -> list[int]:
        chat = compat_client.unfinished_by_core(engine_client)
        return [count + engine.open_calls[core] for core, count in enumerate(chat)]

    return LivenessWatch(cores, unfinished, limit_s)


def served_facts(vllm_config: Any) -> ModelFacts:
    """Facts of the served checkpoint. Blocks: hashing it takes a second per gigabyte, once.

    Relies on: ModelConfig.model, .revision and .get_hidden_size, LoadConfig.download_dir.
    """
    model, cache = vllm_config.model_config, vllm_config.load_config.download_dir
    folder = checkpoint_folder(model.model, model.revision, cache)
    return model_facts(folder, model.get_hidden_size())


def served_kernels(vllm_config: Any) -> dict[str, str]:
    """On what the model runs: what decides how it rounds, for calibrations of honest nodes.

    The name of the card is among them, or which instructions torch uses on a processor; its name
    vLLM does not know.

    Relies on: ModelConfig.dtype, CacheConfig.cache_dtype, ParallelConfig.tensor_parallel_size,
    CompilationConfig.custom_ops, which has "none" where a server compiles,
    Platform.is_cpu and .get_device_name, and of torch.cpu what vLLM chooses its kernels by:
    _is_amx_tile_supported and _is_avx512_bf16_supported.
    """
    from vllm.platforms import current_platform  # noqa: PLC0415 - asks the drivers

    if current_platform.is_cpu():
        device = {"instructions": _instructions()}
    else:
        device = {"processor": current_platform.get_device_name()}
    compiles = "none" in vllm_config.compilation_config.custom_ops
    return {
        "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        "kv_dtype": str(vllm_config.cache_config.cache_dtype),
        "ranks": str(vllm_config.parallel_config.tensor_parallel_size),
        "torch": torch.__version__,
        "ops": PYTORCH_OPS if compiles else VLLM_OPS,
        **device,
    }


def _instructions() -> str:
    found: str = torch.backends.cpu.get_cpu_capability()
    if "AVX" not in found:
        return found
    if torch.cpu._is_amx_tile_supported():
        return f"{found} with AMX"
    return f"{found} {'with' if torch.cpu._is_avx512_bf16_supported() else 'without'} bfloat16"


def call_for(
    work: Workload, facts: ModelFacts, lease: str, nonces: Sequence[int], defer_s: float
) -> dict[str, Any]:
    """The fields of a ``ProveCall``."""
    call = ProveCall(
        lease=lease,
        scheme=work.scheme.to_wire(),
        sequences_per_nonce=work.scheme.sequences_per_nonce,
        weights_digest=facts.weights_digest,
        token_ranges=facts.tokens.ranges if facts.tokens else (),
        block_hash=work.block.hash,
        block_height=work.block.height,
        public_key=work.public_key,
        seq_len=work.seq_len,
        nonces=tuple(nonces),
        defer_s=defer_s,
    )
    return asdict(call)


def read_reply(nonces: Sequence[int], reply: Mapping[str, Any]) -> ProofBatch | Deferred:
    if reply["kind"] == core_messages.PROVED:
        failed = frozenset(reply["failed"])
        proved = tuple(nonce for nonce in nonces[: reply["done"]] if nonce not in failed)
        return ProofBatch(proved, core_messages.values_of(reply), tuple(reply["failed"]))
    if reply["kind"] == core_messages.DEFERRED:
        return Deferred(reply["reason"], reply["seconds"])
    raise EngineFault(reply["error"])
