"""Prompts in a seeded order, decoded and encoded ahead of use by threads or processes (`workers.py`).

The order of an epoch depends only on (seed, epoch), so the state of a run is two numbers: the epoch and the position in
it. Prefetched prompts are limited in number and in bytes; a restore discards them.
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
from mtrl.data.media import Size, limit_side, media_name
from mtrl.data.row_settings import BadRow, DataError, RowError, list_bad_rows
from mtrl.data.video import decode_medium, measure_media, target_sizes
from mtrl.data.workers import DecodeWorkers, Load
from mtrl.protocols import PromptEncoder
from mtrl.types import Medium, Prompt

BYTES_PER_PIXEL = 3
MAX_SKIPPED_SHARE = 0.01  # share of the rows drawn under `on_bad_row: scan`; one bad row never ends a run

Result = TypeVar("Result")
Jobs = queue.SimpleQueue[tuple[Future[Any], Callable[[int], Any], int] | None]

logger = logging.getLogger(__name__)


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation that never changes: numpy guarantees Philox's raw numbers, but not its shuffles."""
    raw = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(rows)
    return np.argsort(raw, kind="stable")


class PromptLoader:
    """Makes prompts: reads the row of a position, decodes its images, encodes. Thread-safe."""

    def __init__(self, dataset: Dataset, encoder: PromptEncoder) -> None:
        self.dataset, self.encoder = dataset, encoder
        self._encoding = threading.Lock()  # tokenizers are not thread-safe
        self._images: weakref.WeakValueDictionary[tuple[Any, Size], np.ndarray] = weakref.WeakValueDictionary()

    def load(self, position: int) -> Prompt | BadRow:
        try:
            return self._load(position)
        except RowError as error:
            return BadRow(*self.dataset.locate(position), error.reason)

    def _load(self, position: int) -> Prompt:
        settings = self.dataset.settings
        task, sizes = measure_media(self.dataset.task(position), self.encoder, verify=False)
        limited = [limit_side(size, settings.max_image_side) for size in sizes]
        targets = target_sizes(self.encoder, limited, task.media)
        media = [self._image(medium, target) for medium, target in zip(task.media, targets, strict=True)]
        if file := self.dataset.changed_file(position):  # after the pixels were read: no moment is left unwatched
            name = next(media_name(medium) for medium in task.media if medium.source == file)
            raise RowError(f"{name} has changed since the run began; restore it, or start a new run")
        try:
            with self._encoding:
                prompt = self.encoder.encode(task, media)
        except ValueError as error:
            raise RowError(str(error)) from error
        if len(prompt.ids) > settings.max_prompt_length:  # it passed the scan, so a file has changed since
            raise RowError(f"the prompt now has {len(prompt.ids)} tokens, over dataset.max_prompt_length")
        return prompt

    def _image(self, medium: Medium, target: Size) -> np.ndarray:
        """Decode an image, or return the pixels of a live prompt that shows the same image."""
        if isinstance(medium.source, Image.Image):
            return decode_medium(medium, target)
        key = _image_key(medium), target
        image = self._images.get(key)
        return self._images.setdefault(key, decode_medium(medium, target)) if image is None else image

    def share_pixels(self, prompt: Prompt) -> Prompt:
        """Replace the images of a prompt from another process by those of live prompts that show the same image."""
        media = [
            array
            if isinstance(medium.source, Image.Image)
            else self._images.setdefault((_image_key(medium), array.shape[-3:-1]), array)
            for medium, array in zip(prompt.task.media, prompt.media, strict=True)
        ]
        return replace(prompt, media=tuple(media)) if media else prompt


def _image_key(medium: Medium) -> str | bytes:
    source = medium.source
    return source if isinstance(source, str) else hashlib.blake2b(source, digest_size=16).digest()


class DecodeThreads:
    """Threads that run jobs in order. On close, garbage collection and interpreter exit they drop jobs that have not
    started; a ThreadPoolExecutor would finish them at exit."""

    def __init__(self, count: int) -> None:
        self._jobs: Jobs = queue.SimpleQueue()
        stopping = threading.Event()
        arguments = (self._jobs, stopping)
        threads = [threading.Thread(target=_work, args=arguments, name="mtrl-data", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, _stop_threads, self._jobs, stopping, threads)  # runs once, also at exit

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
        except BaseException as error:  # raised where the result is used
            future.set_exception(error)
        del item, future, job  # a waiting thread must not keep a prompt alive


def _stop_threads(jobs: Jobs, stopping: threading.Event, threads: list[threading.Thread]) -> None:
    stopping.set()
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # the garbage collector may call from any thread
            thread.join()


class Prefetcher:
    """Loads a sequence of positions ahead of use, in threads, and returns the results in order."""

    def __init__(
        self, load: Load, pixels: np.ndarray, positions: Iterator[int], threads: int, prompts: int, nbytes: int
    ) -> None:
        """`prompts`, `nbytes`: limits of what is ahead; `pixels`: the size of each position's images."""
        self.load, self.pixels, self.positions = load, pixels, positions
        self.max_prompts, self.max_bytes = prompts, nbytes
        self.queue: deque[tuple[int, int, Future[Prompt | BadRow]]] = deque()  # position, bytes, result
        self.bytes = 0
        self.threads = DecodeThreads(threads)
        self.next_position: int | None = None  # drawn, but not yet submitted for lack of room

    def next(self) -> tuple[int, Prompt | BadRow]:
        """Return the next position and its result."""
        self._fill()
        assert self.queue, "no position is left"
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
            position = next(self.positions, None) if self.next_position is None else self.next_position
            self.next_position = position
            if position is None:
                return
            nbytes = int(self.pixels[position]) * BYTES_PER_PIXEL
            if self.queue and self.bytes + nbytes > self.max_bytes:
                return
            self.next_position = None
            self.bytes += nbytes
            self.queue.append((position, nbytes, self.threads.submit(self.load, position)))


class Sampler:
    """A `TaskSource`: draws prompts epoch after epoch, and resumes at the exact next one.

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
        """`workers`: processes that make prompts, forked at the first draw; 0: `threads` make them in this process.
        `prompts_ahead`, `bytes_ahead`: limits of prefetched prompts and of their pixels."""
        assert len(dataset), "open_dataset refuses an empty dataset"
        self.dataset, self.loader = dataset, PromptLoader(dataset, encoder)
        self.shuffle, self.seed, self.bad_rows_path = shuffle, seed, bad_rows_path
        self.epoch = self.position = 0  # where the next prompt is
        self.bad_rows: dict[int, BadRow] = {}  # rows that could not be decoded, by dataset position
        self.skipped: set[int] = set()  # dataset positions of rows that `take` skipped, also before a restore
        self._fingerprint = dataset.fingerprint
        self.num_workers, self._limits = workers, (workers or threads, prompts_ahead, bytes_ahead)
        self._workers: DecodeWorkers | None = None
        self._prefetcher: Prefetcher | None = None

    def take(self, count: int) -> list[Prompt]:
        """Return the next prompts. A row that cannot be decoded is replaced by the next one (under `scan` only while
        they are few); under `error` it raises DataError."""
        prompts: list[Prompt] = []
        failed_in_a_row = 0
        while len(prompts) < count:
            result = self._next()
            if isinstance(result, BadRow):
                failed_in_a_row += 1
                if failed_in_a_row >= len(self.dataset):
                    raise DataError(f"no row can be decoded any more; the last: {result}", [result])
            else:
                prompts.append(result)
                failed_in_a_row = 0
        self._check_skipped(len(self.skipped), self.epoch * len(self.dataset) + self.position)
        return prompts

    def metrics(self) -> dict[str, float]:
        return {"data/skipped_rows": float(len(self.skipped))} if self.skipped else {}

    def get(self, ids: Sequence[str]) -> list[Prompt]:
        """Return prompts by task id; raise DataError if one cannot be made."""
        prompts = []
        for task_id in ids:
            result = self.loader.load(self.dataset.find_position(task_id))
            if isinstance(result, BadRow):
                raise DataError(str(result), [result])
            prompts.append(result)
        return prompts

    def one_pass(self, count: int) -> Iterator[list[Prompt]]:
        """Yield every prompt once, in the order of the files, `count` at a time, for validation. Does not affect
        `take`."""
        rows = len(self.dataset)
        with closing(self._make_prefetcher(iter(range(rows)))) as prefetcher:
            results = (self._report_bad_row(*prefetcher.next()) for _ in range(rows))
            prompts = (result for result in results if not isinstance(result, BadRow))
            while batch := list(islice(prompts, count)):
                yield batch
        self._check_skipped(len(self.bad_rows), rows)

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
        """Continue with the prompt after the saved state; raise DataError if the data or the order differ."""
        now = self.state()
        if state["fingerprint"] != now["fingerprint"]:
            raise DataError(
                f"the data changed since this state was saved ({state['rows']} rows then, {now['rows']} now, or "
                "other content, files or length limit): the exact next prompt is unknown. Restore the data, or start "
                "a new run."
            )
        for name in ("seed", "shuffle"):
            if state[name] != now[name]:
                raise DataError(
                    f"dataset.{name} was {state[name]} when this state was saved and is {now[name]}; "
                    "the order would differ. Set it back, or start a new run."
                )
        self._stop_prefetching()
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.skipped = set(state.get("skipped", ()))  # older versions did not save it

    def close(self) -> None:
        self._stop_prefetching()
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _make_prefetcher(self, positions: Iterator[int]) -> Prefetcher:
        if self.num_workers and self._workers is None:
            self._workers = DecodeWorkers(self.loader.load, self.loader.share_pixels, self.num_workers)
        load = self.loader.load if self._workers is None else self._workers.load
        return Prefetcher(load, self.dataset.pixels, positions, *self._limits)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self) -> Prompt | BadRow:
        if self._prefetcher is None:
            self._prefetcher = self._make_prefetcher(self._positions(self.epoch, self.position))
        position, result = self._prefetcher.next()
        self.position += 1
        if self.position == len(self.dataset):
            self.epoch, self.position = self.epoch + 1, 0
        if isinstance(self._report_bad_row(position, result), BadRow):
            self.skipped.add(position)
        return result

    def _positions(self, epoch: int, start: int) -> Iterator[int]:
        rows = len(self.dataset)
        while True:
            order: Iterable[int] = epoch_order(rows, self.seed, epoch).tolist() if self.shuffle else range(rows)
            yield from islice(order, start, None)
            epoch, start = epoch + 1, 0

    def _report_bad_row(self, position: int, result: Prompt | BadRow) -> Prompt | BadRow:
        """Raise an error for a bad row under `error`, else count, list and log it once; return the result."""
        if isinstance(result, BadRow):
            if self.dataset.settings.on_bad_row == "error":
                raise DataError(str(result), [result])
            if position not in self.bad_rows:
                self.bad_rows[position] = result
                logger.warning("%s; another row replaces it (%d so far)", result, len(self.bad_rows))
                if self.bad_rows_path is not None:
                    list_bad_rows(self.bad_rows_path, [result], late=True)
        return result

    def _check_skipped(self, skipped: int, drawn: int) -> None:
        if self.dataset.settings.on_bad_row == "scan" and skipped > max(1, MAX_SKIPPED_SHARE * drawn):
            last = list(self.bad_rows.values())[-1:]
            raise DataError(
                f"{skipped} of the {drawn} rows drawn so far could not be read, more than {MAX_SKIPPED_SHARE:.0%}"
                f"{f'; the last: {last[0]}' if last else ''}. Repair the data, or set dataset.on_bad_row=skip to "
                "continue without such rows",
                last,
            )

    def _stop_prefetching(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
