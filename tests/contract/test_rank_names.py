"""Pins the names of vLLM on which the check of all ranks relies, for each executor.

A failure here after an upgrade says to revisit ``engines/vllm/compat_core.py``. vLLM's CPU
build cannot run Ray's executors, so their names are all that is tested of them.
"""

import inspect
import re
from pathlib import Path

import pytest
import vllm
from vllm.config import ParallelConfig
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

from support.contract import in_order, since, source


def of_ray(module: str) -> str:
    """The text of an executor's module, whose classes exist only where Ray does."""
    folder = Path(str(inspect.getsourcefile(vllm))).parent
    return (folder / "v1" / "executor" / f"{module}.py").read_text()


def test_the_core_passes_a_callable_and_a_time_limit_on() -> None:
    called = "self.model_executor.collective_rpc(method, timeout, args, kwargs)"
    assert called in source(EngineCore.collective_rpc)
    for executor in (UniProcExecutor, MultiprocExecutor):
        names = list(inspect.signature(executor.collective_rpc).parameters)
        assert names[:3] == ["self", "method", "timeout"]


def test_the_multiprocess_executor_sends_code_to_the_workers_of_all_nodes() -> None:
    body = source(MultiprocExecutor.collective_rpc)
    assert "cloudpickle.dumps(method" in body
    assert "for mq in response_mqs:" in body
    assert "responses.append(result)" in body
    assert "partial(cloudpickle.loads(method), self.worker)" in source(WorkerProc)


def test_rays_executors_send_code_to_all_workers() -> None:
    if not since(0, 33):
        older = of_ray("ray_executor")
        assert in_order(
            older[older.index("def collective_rpc(") :],
            "method: str | Callable",
            "timeout: float | None",
            "cloudpickle.dumps(method)",
            "for worker in self.workers",
            "ray.get(ray_worker_outputs, timeout=timeout)",
        )
        assert "class RayWorkerWrapper(WorkerWrapperBase):" in of_ray("ray_utils")
        assert "return run_method(self, method, args, kwargs)" in of_ray("ray_utils")
    # The newer executor, vLLM's default with Ray, sends as the multiprocess one does.
    newer = of_ray("ray_executor_v2")
    assert "class RayExecutorV2(MultiprocExecutor):" in newer
    assert "class RayWorkerProc(WorkerProc):" in newer
    assert "def collective_rpc(" not in newer
    assert "func = partial(cloudpickle.loads(method), obj)" in source(run_method)


def test_ranks() -> None:
    assert "self.rank = rank" in source(WorkerBase.__init__)
    assert "return getattr(self.worker, attr)" in source(WorkerWrapperBase.__getattr__)
    assert "world_size" in ParallelConfig.__dataclass_fields__


@pytest.mark.skipif(not current_platform.is_cpu(), reason="says what the CPU build refuses")
def test_a_cpu_cannot_run_ray() -> None:
    """If this fails, run the check with Ray and correct docs/operations.md."""
    assert current_platform.ray_device_key == ""
    assert re.search(r"current platform .* does not support ray\.", of_ray("ray_utils"))
