"""One process of several that are an engine of vLLM together, on CPUs (`worker_cls` of vLLM)."""

from __future__ import annotations

import os
from pathlib import Path

from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.cpu_worker import CPUWorker

SHARED_MEMORY = Path("/dev/shm")


class CpuPart(CPUWorker):
    """Its parts exchange numbers in memory that they share."""

    def init_device(self) -> None:
        """vLLM calls that memory by the end of their address, `env://` for all engines that others launch: they would
        meet in it, and in what a killed run has left. The port is their own; and once all have opened it, it needs no
        name, and goes when they end."""
        port = os.environ["MASTER_PORT"]
        self.distributed_init_method = f"tcp://{os.environ['MASTER_ADDR']}:{port}"
        super().init_device()
        parts = "-".join(map(str, get_tp_group().ranks))
        for named in SHARED_MEMORY.glob(f"{port}-*{parts}]-cpushm_*"):
            named.unlink(missing_ok=True)
