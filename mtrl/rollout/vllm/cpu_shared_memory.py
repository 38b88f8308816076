"""The worker of a tensor-parallel vLLM engine on CPUs (`worker_cls` of vLLM)."""

from __future__ import annotations

import os
from pathlib import Path

from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.cpu_worker import CPUWorker

SHARED_MEMORY = Path("/dev/shm")


class CpuPart(CPUWorker):
    """Workers of one engine exchange numbers in shared memory."""

    def init_device(self) -> None:
        """vLLM names that memory by the end of the group's address, which is `env://` for all externally launched
        engines: they would use the same memory, and that of a killed run. This names it by the engine's port, and
        removes the name once all have opened it, so that the memory is freed when they end."""
        port = os.environ["MASTER_PORT"]
        self.distributed_init_method = f"tcp://{os.environ['MASTER_ADDR']}:{port}"
        super().init_device()
        ranks = "-".join(map(str, get_tp_group().ranks))
        for file in SHARED_MEMORY.glob(f"{port}-*{ranks}]-cpushm_*"):
            file.unlink(missing_ok=True)
