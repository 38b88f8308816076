"""Prompts in a seeded order, decoded and encoded ahead of use, by threads or by processes (`workers.py`).

The order of an epoch depends on (seed, epoch) alone, so the state of a run is two numbers: the epoch and the position
in it. What is ahead is bounded in prompts and in bytes, and thrown away and made again by a restore.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from mtrl.data.dataset import Dataset
from mtrl.data.media import Size, within_side
from mtrl.data.row_settings import BadRow, DataError, RowError, list_bad_rows
from mtrl.data.video import measure, pixels, target_sizes
from mtrl.data.workers import DecodeWorkers
from mtrl.protocols import PromptEncoder
from mtrl.types import Medium, Prompt

BYTES_PER_PIXEL = 3
MOST_SKIPPED = 0.01  # share of the rows asked that `on_bad_row: scan` does without; a single row never ends a run

Result = TypeVar("Result")
Jobs = queue.SimpleQueue[tuple[Future[Any], Callable[[int], Any], int] | None]

logger = logging.getLogger(__name__)


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation that is the same for ever: numpy promises Philox's raw numbers, not those of its shuffles."""
    raw = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(rows)
    return np.argsort(raw, kind="stable")


class PromptLoader:
    """Makes the prompt of one position: reads the row, decodes its images, encodes. Safe from several threads."""

    def __init__(self, dataset: Dataset, encoder: PromptEncoder) -> None:
        self.dataset, self.encoder = dataset, encoder
        self._encoding = threading.Lock()  # tokenizers are not made for several threads
        self._images: weakref.WeakValueDictionary[tuple[Any, Size], np.ndarray] = weakref.WeakValueDictionary()

    def load(self, position: int) -> Prompt | BadRow:
        try:
            return self._load(position)
        except RowError as error:
            return BadRow(*self.dataset.place(position), error.reason)

    def _load(self, position: int) -> Prompt:
        settings = self.dataset.settings
        task, sizes = measure(self.dataset.task(position), self.encoder, verify=False)
        limited = [within_side(size, settings.max_image_side) for size in sizes]
        targets = target_sizes(self.encoder, limited, task.media)
        media = [self._image(medium, target) for medium, target in zip(task.media, targets, strict=True)]
        try:
            with self._encoding:
                prompt = self.encoder.encode(task, media)
        except ValueError as error:
            raise RowError(str(error)) from error
        if len(prompt.ids) > settings.max_prompt_length:  # it passed the scan, so a file changed since
            raise RowError(f"the prompt now has {len(prompt.ids)} tokens, over dataset.max_prompt_length")
        return prompt

    def _image(self, medium: Medium, target: Size) -> np.ndarray:
        """Pixels, shared with every prompt now alive that shows the same image."""
        if isinstance(medium.source, Image.Image):
            return pixels(medium, target)
        key = _task_name(medium), target
        found = self._images.get(key)
        if found is None:
            found = self._images.setdefault(key, pixels(medium, target))
        return found

    def sharing(self, prompt: Prompt) -> Prompt:
        """A prompt that another process has made, with the pixels of those alive that show the same image."""
        media = [
            array
            if isinstance(medium.source, Image.Image)
            else self._images.setdefault((_task_name(medium), array.shape[-3:-1]), array)
            for medium, array in zip(prompt.task.media, prompt.media, strict=True)
        ]
        return replace(prompt, media=tuple(media)) if media else prompt


def _task_name(medium: Medium) -> str | bytes:
    source = medium.source
    return source if isinstance(source, str) else hashlib.blake2b(source, digest_size=16).digest()


class ForkedLoader:
    """A PromptLoader whose prompts are made by so many processes."""

    def __init__(self, loader: PromptLoader, count: int) -> None:
        self.loader, self.dataset, self.workers = loader, loader.dataset, DecodeWorkers(loader.load, count)

    def load(self, position: int) -> Prompt | BadRow:
        found = self.workers.load(position)
        return found if isinstance(found, BadRow) else self.loader.sharing(found)


class Threads:
    """A few threads for jobs in order. Closing, being forgotten and the end of the interpreter all drop the jobs that
    have not begun; the pool of the standard library would finish them first."""

    def __init__(self, count: int) -> None:
        self._jobs: Jobs = queue.SimpleQueue()
        stopping = threading.Event()
        arguments = (self._jobs, stopping)
        threads = [threading.Thread(target=_work, args=arguments, name="mtrl-data", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, _stop, self._jobs, stopping, threads)  # runs once, at exit at the latest

    def submit(self, job: Callable[[int], Result], argument: int) -> Future[Result]:
        future: Future[Result] = Future()
        self._jobs.put((future, job, argument))
        return future


def _work(jobs: Jobs, stopping: threading.Event) -> None:
    while (item := jobs.get()) is not None:
        future, job, argument = item
        if stopping.is_set():
            future.cancel()
            continue
        try:
            future.set_result(job(argument))
        except BaseException as error:  # whatever it is, it is raised where the result is asked for
            future.set_exception(error)
        del item, future, job  # nothing may keep a prompt alive while the thread waits


def _stop(jobs: Jobs, stopping: threading.Event, threads: list[threading.Thread]) -> None:
    stopping.set()
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # the garbage collector may call from any thread
            thread.join()


class Prefetcher:
    """Results for a row of positions, in order, made by threads before they are asked for."""

    def __init__(
        self, loader: PromptLoader | ForkedLoader, positions: Iterator[int], threads: int, prompts: int, nbytes: int
    ) -> None:
        self.loader, self.positions, self.max_prompts, self.max_bytes = loader, positions, prompts, nbytes
        self.queue: deque[tuple[int, int, Future[Prompt | BadRow]]] = deque()  # position, bytes, result
        self.bytes = 0
        self.threads = Threads(threads)
        self.spare: int | None = None  # a position drawn but not started for lack of room

    def next(self) -> tuple[int, Prompt | BadRow]:
        """The next position and its result."""
        self._fill()
        assert self.queue, "asked for more than there are positions"
        position, nbytes, future = self.queue.popleft()
        self.bytes -= nbytes
        result = future.result()
        self._fill()
        return position, result

    def close(self) -> None:
        self.threads.close()
        self.queue.clear()

    def _fill(self) -> None:
        while len(self.queue) < self.max_prompts:
            position = next(self.positions, None) if self.spare is None else self.spare
            self.spare = position
            if position is None:
                return
            nbytes = int(self.loader.dataset.pixels[position]) * BYTES_PER_PIXEL
            if self.queue and self.bytes + nbytes > self.max_bytes:
                return
            self.spare = None
            self.bytes += nbytes
            self.queue.append((position, nbytes, self.threads.submit(self.loader.load, position)))


class Sampler:
    """A `TaskSource`: takes prompts epoch after epoch, resumes at the exact next one.

    with Sampler(dataset, encoder, seed=42) as sampler:
        prompts = sampler.take(256)
        state = sampler.state()          # {"epoch": 0, "position": 256, ...}
    """

    def __init__(
        self,
        dataset: Dataset,
        encoder: PromptEncoder,
        *,
        shuffle: bool = True,
        seed: int = 42,
        bad_rows_path: Path | None = None,
        workers: int = 0,
        threads: int = 2,
        prompts_ahead: int = 64,
        bytes_ahead: int = 256 << 20,
    ) -> None:
        """`workers`: processes that make the prompts, from the first that is asked for; none: `threads` do. As many
        prompts and bytes of pixels are made ahead."""
        assert len(dataset), "open_dataset refuses an empty dataset"
        self.dataset, self.loader = dataset, PromptLoader(dataset, encoder)
        self.shuffle, self.seed, self.bad_rows_path = shuffle, seed, bad_rows_path
        self.epoch = self.position = 0  # where the next prompt stands
        self.bad_rows: dict[int, BadRow] = {}  # found while decoding, by dataset position
        self.skipped: set[int] = set()  # dataset positions of rows that `take` left out, before a restore too
        self._fingerprint = dataset.fingerprint
        self.workers, self._limits = workers, (workers or threads, prompts_ahead, bytes_ahead)
        self._forked: ForkedLoader | None = None
        self._ahead: Prefetcher | None = None

    def take(self, count: int) -> list[Prompt]:
        """The next prompts. For a row that cannot be decoded the next one stands in, under `scan` as long as those are
        few; under `error` it raises DataError."""
        prompts: list[Prompt] = []
        refused = 0
        while len(prompts) < count:
            result = self._next()
            if isinstance(result, BadRow):
                refused += 1
                if refused >= len(self.dataset):
                    raise DataError(f"no row can be decoded any more; the last: {result}", [result])
            else:
                prompts.append(result)
                refused = 0
        self._refuse_many(len(self.skipped), self.epoch * len(self.dataset) + self.position)
        return prompts

    def metrics(self) -> dict[str, float]:
        return {"data/skipped_rows": float(len(self.skipped))} if self.skipped else {}

    def get(self, ids: Sequence[str]) -> list[Prompt]:
        """Prompts by task id. One that cannot be made is an error: nothing can stand in for it."""
        prompts = []
        for task_id in ids:
            result = self.loader.load(self.dataset.position(task_id))
            if isinstance(result, BadRow):
                raise DataError(str(result), [result])
            prompts.append(result)
        return prompts

    def one_pass(self, count: int) -> Iterator[list[Prompt]]:
        """Every prompt once, in the order of the files, `count` at a time: for validation. Leaves `take` alone."""
        with closing(self._prefetcher(iter(range(len(self.dataset))))) as ahead:
            prompts = (prompt for prompt in self._results(ahead) if not isinstance(prompt, BadRow))
            while batch := list(islice(prompts, count)):
                yield batch
        self._refuse_many(len(self.bad_rows), len(self.dataset))

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self._fingerprint,
            "rows": len(self.dataset),
            "skipped": sorted(self.skipped),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with the prompt that follows the saved state. Refuses a state of other data or another order."""
        now = self.state()
        if state["fingerprint"] != now["fingerprint"]:
            raise DataError(
                f"the data changed since this state was saved ({state['rows']} rows then, {now['rows']} now, or "
                "other content, files or length limit): the exact next prompt is not known. Restore the data, or start "
                "a new run."
            )
        for name in ("seed", "shuffle"):
            if state[name] != now[name]:
                raise DataError(
                    f"dataset.{name} was {state[name]} when this state was saved and is {now[name]}; "
                    "the order would differ. Set it back, or start a new run."
                )
        self._stop()
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.skipped = set(state.get("skipped", ()))  # states of older versions count none

    def close(self) -> None:
        self._stop()
        if self._forked is not None:
            self._forked.workers.close()
            self._forked = None

    def _prefetcher(self, positions: Iterator[int]) -> Prefetcher:
        if self.workers and self._forked is None:
            self._forked = ForkedLoader(self.loader, self.workers)
        return Prefetcher(self._forked or self.loader, positions, *self._limits)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self) -> Prompt | BadRow:
        if self._ahead is None:
            self._ahead = self._prefetcher(self._positions(self.epoch, self.position))
        position, result = self._ahead.next()
        self.position += 1
        if self.position == len(self.dataset):
            self.epoch, self.position = self.epoch + 1, 0
        if isinstance(self._checked(position, result), BadRow):
            self.skipped.add(position)
        return result

    def _positions(self, epoch: int, start: int) -> Iterator[int]:
        rows = len(self.dataset)
        while True:
            order: Iterable[int] = epoch_order(rows, self.seed, epoch).tolist() if self.shuffle else range(rows)
            yield from islice(order, start, None)
            epoch, start = epoch + 1, 0

    def _results(self, ahead: Prefetcher) -> Iterator[Prompt | BadRow]:
        for _ in range(len(self.dataset)):
            yield self._checked(*ahead.next())

    def _checked(self, position: int, result: Prompt | BadRow) -> Prompt | BadRow:
        """A bad row found only now: an error under `error`, else counted, listed and said, once."""
        if isinstance(result, BadRow):
            if self.dataset.settings.on_bad_row == "error":
                raise DataError(str(result), [result])
            if position not in self.bad_rows:
                self.bad_rows[position] = result
                logger.warning("%s; another row stands in (%d so far)", result, len(self.bad_rows))
                if self.bad_rows_path is not None:
                    list_bad_rows(self.bad_rows_path, [result], late=True)
        return result

    def _refuse_many(self, skipped: int, asked: int) -> None:
        if self.dataset.settings.on_bad_row == "scan" and skipped > max(1, MOST_SKIPPED * asked):
            last = list(self.bad_rows.values())[-1:]
            raise DataError(
                f"{skipped} of the {asked} rows asked so far could not be read, more than {MOST_SKIPPED:.0%}"
                f"{f'; the last: {last[0]}' if last else ''}. Repair the data, or set dataset.on_bad_row=skip to go on "
                "without such rows",
                last,
            )

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
