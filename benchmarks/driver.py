"""Bytes, seconds and memory of the driver of several ranks as a step grows from 64 prompts to 4,096.

    python -m benchmarks.driver [--sizes 64 .. 4096] [--steps 3] [--out benchmarks/results/driver.json]

The driver is the real one: `training/loop.py` with `DistributedGenerator` and `DistributedLearner` over a
`RayWorkerGroup`, which puts each prompt with its pixels into Ray's store once. **The workers are simulated**: two Ray
processes hold no model and return random tokens and signals of the right shapes. Data and rewards are simulated too, so
that only the cost of the driver remains.

The first step of a size counts pickled bytes and is not timed. Seconds are the driver's CPU time (all its threads,
including Ray's, without the memory sampler) and its wall time. Memory is the peak of the driver's own memory within a
step (RssAnon, without the store's shared memory).
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtrl.algorithms.advantages import ESTIMATORS
from mtrl.algorithms.batches import BatchPlan
from mtrl.algorithms.losses import Loss
from mtrl.bench.environment import environment
from mtrl.distributed.generator_proxy import DistributedGenerator
from mtrl.distributed.learner_proxy import DistributedLearner
from mtrl.distributed.object_refs import ObjectRefs
from mtrl.distributed.ray_group import RayWorkerGroup
from mtrl.models.parallel.ranks import Ranks
from mtrl.protocols import Tracker
from mtrl.report.chart import Curve, Panel, draw_chart
from mtrl.training.algorithm_spec import AlgorithmSpec
from mtrl.training.loop import Components, Loop
from mtrl.types import Needs, Prompt, Rewards, Rollouts, Sampling, Signals, Task

SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
RANKS, RESPONSES, LENGTH, PROMPT_TOKENS, PIXELS = 2, 8, 128, 96, 112
MB, MIB = 1e6, 2**20


# ------------------------------------------------------------------------------------------ simulated: on every rank
@dataclass
class SimulatedEngine:
    """Returns random responses of random lengths immediately."""

    version: int = 0

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def load(self) -> int:
        self.version += 1
        return self.version - 1

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        rows = len(prompts) * sampling.n
        random = torch.Generator().manual_seed(sampling.step)
        lengths = torch.randint(sampling.max_new_tokens // 2, sampling.max_new_tokens + 1, (rows,), generator=random)
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        tokens = torch.randint(1000, mask.shape, generator=random).where(mask, 0)
        return Rollouts(
            prompts=(),
            group=torch.arange(len(prompts)).repeat_interleave(sampling.n),
            tokens=tokens,
            mask=mask,
            rollout_logprobs=(-torch.rand(mask.shape, generator=random)).where(mask, 0.0),
            text=("x" * LENGTH,) * rows,
            finish_reason=("stop",) * rows,
            version=torch.full((rows,), sampling.version),
        )


@dataclass
class SimulatedActor:
    """Returns the sampler's own log-probs as signals; its updates do nothing."""

    updates: int = 0

    def probe(self, rollouts: Rollouts, needs: Needs, step: int) -> Signals:
        return Signals(
            old_logprobs=rollouts.rollout_logprobs, entropy=torch.ones(rollouts.mask.shape).where(rollouts.mask, 0.0)
        )

    def update(self, batches: Sequence[Any], loss: Any) -> dict[str, float]:
        self.updates += 1
        return {"pg_loss": 0.0, "grad_norm": 1.0}

    def version(self) -> int:
        return self.updates


def make_simulated_roles(ranks: Ranks) -> Mapping[str, Any]:
    engine = SimulatedEngine()
    engine.load()
    return {"actor": SimulatedActor(), "engine": engine}


# ------------------------------------------------------------------------------------------ simulated: on the driver
@dataclass
class SimulatedSource:
    """Prompts with random pixels, made before the timed part of a step."""

    made: int = 0
    ready: list[Prompt] = field(default_factory=list)

    def prepare(self, count: int) -> None:
        random = np.random.default_rng(self.made)
        self.ready = [self._prompt(f"simulated:{self.made + number}", random) for number in range(count)]
        self.made += count

    def _prompt(self, name: str, random: np.random.Generator) -> Prompt:
        pixels = random.integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
        ids = torch.arange(PROMPT_TOKENS)
        return Prompt(Task(name, name, ({"role": "user", "content": "?"},)), (pixels,), ids, ids, torch.ones_like(ids))

    def take(self, count: int) -> list[Prompt]:
        taken, self.ready = self.ready, []
        assert len(taken) == count
        return taken

    def get(self, ids: Sequence[str]) -> list[Prompt]:
        raise NotImplementedError("nothing is replayed here")

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class SimulatedRewards:
    rows: int

    def result(self, signals: Signals | None = None) -> Rewards:
        total = torch.rand(self.rows, generator=torch.Generator().manual_seed(self.rows)).round()
        return Rewards(total, {"accuracy": total}, torch.zeros(self.rows, dtype=torch.bool))


class SimulatedScorer:
    def submit(self, rollouts: Rollouts, step: int | None) -> SimulatedRewards:
        return SimulatedRewards(len(rollouts))


# ----------------------------------------------------------------------------------------------------- measurements
class ByteCountingGroup(RayWorkerGroup):
    """A RayWorkerGroup that counts bytes while `counting`."""

    counting = False

    def call(self, role: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        found = super().call(role, method, arguments)
        if self.counting:
            named = [ObjectRefs(lambda prompt: 0).share(each) for each in arguments]
            self.counts["to_ranks"] += sum(len(pickle.dumps(each, 5)) for each in named)
            self.counts["from_ranks"] += sum(len(pickle.dumps(each, 5)) for each in found)
        return found

    def count(self) -> Counter[str]:
        """Starts counting, also of the bytes that go to the store."""
        self.counts: Counter[str] = Counter()
        self.counting, put = True, self.object_refs.put

        def counted(prompt: Prompt) -> Any:
            self.counts["to_store"] += len(pickle.dumps(prompt, 5))
            return put(prompt)

        self.object_refs = ObjectRefs(counted)
        return self.counts


def make_loop(worker_group: RayWorkerGroup, prompts: int, version: int) -> Loop:
    """The project's loop over simulated workers: plain GRPO, four optimizer steps."""
    spec = AlgorithmSpec(
        total_steps=1 << 30,
        prompts_per_step=prompts,
        sampling=Sampling(n=RESPONSES, max_new_tokens=LENGTH),
        needs=Needs("old_logprobs", "entropy"),
        attention_every=0,
        estimator=ESTIMATORS["grpo"](),
        divergence=None,
        credit=(),
        loss=Loss(),
        batches=BatchPlan(prompts // 4, max_response_length=LENGTH),
        val_freq=-1,
        validate_first=False,
        save_freq=-1,
    )
    actor: Any = DistributedLearner(worker_group, "actor")
    store: Any = None  # nothing is saved here
    loop = Loop(
        Components(
            source=SimulatedSource(),
            generator=DistributedGenerator(worker_group),
            scorer=SimulatedScorer(),
            probers=[actor],
            actor=actor,
            tracker=Tracker(),
            store=store,
            validation=None,
        ),
        spec,
    )
    loop.version = version
    return loop


def measure(worker_group: ByteCountingGroup, prompts: int, steps: int, version: int) -> dict[str, Any]:
    """One counted step, then `steps` timed ones."""
    loop = make_loop(worker_group, prompts, version)
    source: Any = loop.components.source
    plain, counts = worker_group.object_refs, worker_group.count()
    source.prepare(prompts)
    loop.step(0)
    worker_group.counting, worker_group.object_refs = False, plain
    timed = []
    for step in range(1, steps + 1):
        source.prepare(prompts)
        began, processors = time.perf_counter(), time.process_time()
        with watch_memory() as watch:
            loop.step(step)
        own = time.process_time() - processors - watch.processor_s
        timed.append((own, time.perf_counter() - began, watch.peak / MIB))
    cpu, clock, memory = zip(*timed, strict=True)
    return {
        "prompts": prompts,
        "bytes": dict(counts),
        "driver_cpu_s": round(statistics.median(cpu), 4),
        "clock_s": round(statistics.median(clock), 4),
        "peak_mib_by_step": [round(each, 1) for each in memory],
    }


@dataclass
class MemoryWatch:
    """Peak of the process's own memory in bytes, and the CPU seconds of sampling it."""

    peak: int = 0
    processor_s: float = 0.0

    def sample_until(self, done: threading.Event) -> None:
        while not done.wait(0.01):
            self.peak = max(self.peak, own_memory())
        self.processor_s = time.thread_time()


@contextmanager
def watch_memory() -> Iterator[MemoryWatch]:
    """Samples the memory every 10 ms in a thread."""
    watch, done = MemoryWatch(own_memory()), threading.Event()
    thread = threading.Thread(target=watch.sample_until, args=(done,), daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        done.set()
        thread.join()


def own_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def run(sizes: Sequence[int], steps: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as logs:
        worker_group = ByteCountingGroup(RANKS, RANKS, make_simulated_roles, Path(logs), heartbeat=600.0)
        try:
            for size in sizes:
                version = worker_group.call_rank0("actor", "version")
                rows.append(measure(worker_group, size, steps, version))
                print(json.dumps(rows[-1]), flush=True)
        finally:
            worker_group.close()
    return rows


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    names = {"to_store": "prompts with pixels, to the store", "to_ranks": "to ranks", "from_ranks": "from ranks"}
    moved = [Curve(name, [(r["prompts"], r["bytes"][key] / MB) for r in rows]) for key, name in names.items()]
    panels = [
        Panel("MB moved", moved),
        Panel("CPU seconds of the driver", [Curve("driver", [(r["prompts"], r["driver_cpu_s"]) for r in rows])]),
        Panel("MiB of the driver", [Curve("driver", [(r["prompts"], max(r["peak_mib_by_step"])) for r in rows])]),
    ]
    note = (
        f"{RESPONSES} responses of up to {LENGTH} tokens per prompt, {PIXELS}-px images, {RANKS} simulated Ray ranks."
    )
    draw_chart(path, "A step of the driver, by prompts", panels, note, x_name="prompts per step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/driver.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/driver.png"))
    parser.add_argument("--redraw", action="store_true", help="only draw the existing result of --out")
    options = parser.parse_args()
    if not options.redraw:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        settings = {"ranks": RANKS, "responses": RESPONSES, "tokens": LENGTH, "pixels": PIXELS, "workers": "simulated"}
        result = {**settings, "rows": run(options.sizes, options.steps), **environment()}
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    draw(options.picture, json.loads(options.out.read_text())["rows"])


if __name__ == "__main__":
    main()
