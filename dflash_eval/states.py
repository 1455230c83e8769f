"""The target's states on their way into shards: it computes while what it computed before is copied and written.

    forward ─► columns on the GPU ─► side stream ─► pinned memory ─► filling thread ─► shard ─► closing threads

Each arrow is one step a batch, whatever the number of samples and layers: the thread that launches the target's
kernels has next to nothing else to do.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_eval import ranks
from dflash_eval.acceptance.sampling import Sampling
from dflash_eval.batches import plan_batches
from dflash_eval.cache import Manifest, Sample, Shard, ShardWriter
from dflash_eval.errors import RunError
from dflash_eval.forward import compile_layers, forward
from dflash_eval.machine import out_of_memory
from dflash_eval.progress import say
from dflash_eval.signals import Stop
from dflash_eval.target import Target

SLOTS = 3  # of pinned memory: one is written, one waits, one is being filled
ALIGNED = 64
CLOSERS = 3  # shards that are made durable and hashed at once: one thread hashes slower than a large GPU computes


@dataclass(frozen=True)
class PlannedShard:
    number: int  # of its first batch, which no other shard has
    batches: list[list[int]]  # of sample indices


@dataclass
class Times:
    """Where the wall time went, in seconds; and what came of it."""

    seconds: float = 0.0
    compiling: float = 0.0  # before `seconds` began
    target_waited: float = 0.0  # for the disk
    writer_idle: float = 0.0  # for the target
    tokens: int = 0
    shards: list[Shard] = field(default_factory=list)


def plan_shards(manifest: Manifest, samples: Sequence[Sample], done: set[str]) -> list[PlannedShard]:
    """What this rank is to write: shards of whole batches, none above `shard_bytes` but that of a single larger batch.

    The batches depend on the sequences alone; they are dealt whole, so that any number of ranks, and a run that
    resumes with another number, computes the same. done: ids of samples that are in shards already.
    """
    batches = plan_batches([len(sample) for sample in samples], manifest.batch_tokens)
    todo = [(n, batch) for n, batch in enumerate(batches) if any(samples[i].id not in done for i in batch)]
    tokens = [sum(len(samples[i]) for i in batch) for _, batch in todo]
    shards: list[PlannedShard] = []
    size = 0
    for number, batch in ranks.deal(todo, tokens):
        more = sum(len(samples[i]) for i in batch) * manifest.token_bytes()
        if not shards or size + more > manifest.shard_bytes:
            shards.append(PlannedShard(number, []))
            size = 0
        shards[-1].batches.append(batch)
        size += more
    return shards


def write_states(
    folder: Path,
    manifest: Manifest,
    samples: Sequence[Sample],
    target: Target,
    shards: Sequence[PlannedShard],
    *,
    stop: Stop,
    compiled: bool = False,
    advance: Callable[[int], None] = lambda _: None,
    written: Callable[[Shard], None] = lambda _: None,
    open_shard: Callable[..., Any] = ShardWriter,
) -> Times:
    """Write the planned shards; `written` hears of each as soon as it is whole, from another thread.

    A batch that does not fit in memory is halved, and so are those after it. After a signal the shard in work is
    finished. Raises what went wrong in writing as soon as it did.
    """
    times = Times()
    sampling = (manifest.sampling() or Sampling()) if manifest.target_stats else None
    store = manifest.stored_dtype()
    compute = _Halving(lambda rows: forward(target, rows, manifest.layers, store, sampling))
    if compiled and shards:
        largest = [samples[i] for i in shards[0].batches[0]]
        times.compiling = compile_layers(target, lambda: list(compute(largest)), say)
    most = max((sum(len(samples[i]) for i in batch) for shard in shards for batch in shard.batches), default=0)

    listing = threading.Lock()

    def close(writer: Any) -> None:
        shard = writer.close()
        with listing:
            times.shards.append(shard)
            written(shard)

    start = time.perf_counter()
    with ExitStack() as stack:
        opened: list[Any] = []
        stack.callback(lambda: [writer.discard() for writer in opened])  # of a shard that is whole it changes nothing
        closers = [stack.enter_context(_Worker()) for _ in range(CLOSERS)]
        filling = stack.enter_context(_Worker())

        def fill(writer: Any, closing: _Worker, first: int, host: dict[str, Tensor], ready: Callable[[], None]) -> None:
            waiting = time.perf_counter()
            ready()
            times.writer_idle += time.perf_counter() - waiting
            writer.write(first, host)
            closing.do(writer.sync)

        ring = _Ring(most * (manifest.token_bytes() + ALIGNED) if target.device.type == "cuda" else 0)
        for turn, planned in enumerate(shards):
            closing = closers[turn % CLOSERS]
            inside = [samples[i] for batch in planned.batches for i in batch]
            writer = open_shard(
                folder / f"states-{planned.number:05d}.h5",
                inside, manifest.layers, manifest.hidden_size, store, manifest.target_stats,
            )  # fmt: skip
            opened.append(writer)
            first = 0
            for batch in planned.batches:
                for rows, columns in compute([samples[i] for i in batch]):
                    tokens = sum(map(len, rows))
                    filling.do(partial(fill, writer, closing, first, *ring.to_host(columns)))
                    first += tokens
                    times.tokens += tokens
                    advance(tokens)
            filling.do(partial(closing.do, partial(close, writer)))
            if stop.signal is not None:
                break
        filling.finish()
        for closing in closers:
            closing.finish()
        times.target_waited, times.writer_idle = filling.full, times.writer_idle + filling.idle
    times.seconds = time.perf_counter() - start
    return times


class _Halving:
    """Forwards of a batch, in pieces from the first time on that memory ran out."""

    def __init__(self, run: Callable[[Sequence[Sample]], dict[str, Tensor]]) -> None:
        self.run = run
        self.limit: int | None = None  # tokens, padding counted

    def __call__(self, batch: Sequence[Sample]) -> Iterator[tuple[Sequence[Sample], dict[str, Tensor]]]:
        todo = [batch]
        while todo:
            rows = todo.pop(0)
            size = len(rows) * max(map(len, rows))
            if len(rows) > 1 and self.limit is not None and size > self.limit:
                todo[:0] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
                continue
            columns = self._try(rows)
            if columns is not None:
                yield rows, columns
                continue
            if len(rows) == 1:  # outside the except: its traceback holds on to what is to be freed
                raise RunError(
                    f"out of memory with one sequence of {size:,} tokens; finished shards are kept\n"
                    "free the GPU, or set target.device_map: auto to use several, and run the same command"
                )
            if self.limit is None:
                say(f"out of memory at {size:,} tokens a batch: going on with half as many at once")
            self.limit = size // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            todo.insert(0, rows)

    def _try(self, rows: Sequence[Sample]) -> dict[str, Tensor] | None:
        try:
            return self.run(rows)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
        return None


class _Ring:
    """Pinned memory that columns are copied to in turn, each GPU's on a stream of its own.

    A slot is used again SLOTS batches later; the filling thread, which lets one batch wait, is through with it by then.
    """

    def __init__(self, size: int) -> None:
        """size: of a slot, in bytes; 0 where columns are on the CPU already."""
        self.slots = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(SLOTS)] if size else []
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.turn = 0

    def to_host(self, columns: dict[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """The columns' place on the CPU, and what to call before they are read there."""
        if not self.slots:
            return columns, lambda: None
        slot = self.slots[self.turn % SLOTS]
        self.turn += 1
        host: dict[str, Tensor] = {}
        place = 0
        for name, column in columns.items():
            host[name] = slot[place : place + column.nbytes].view(column.dtype).view(column.shape)
            place += -(-column.nbytes // ALIGNED) * ALIGNED
        copied = []
        for device in {column.device for column in columns.values()}:
            if device not in self.streams:
                self.streams[device] = torch.cuda.Stream(device)
            stream = self.streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for name, column in columns.items():
                    if column.device == device:
                        host[name].copy_(column, non_blocking=True)
                        column.record_stream(stream)
                copied.append(torch.cuda.Event(blocking=True))
                copied[-1].record(stream)
        columns.clear()  # the GPU's memory is free as soon as it is copied

        def ready() -> None:
            for event in copied:
                event.synchronize()

        return host, ready


class _Worker:
    """Does what it is given in order, in a thread; one piece waits, a further one makes the giver wait.

    What goes wrong there is raised where work is given; the rest is dropped then.
    """

    def __init__(self) -> None:
        self.idle = self.full = 0.0  # seconds without work; seconds that givers waited
        self.error: BaseException | None = None
        self.work: queue.Queue[Callable[[], None] | None] = queue.Queue(1)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Worker:
        self.thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.thread.is_alive():
            self.error = self.error or error
            self.work.put(None)
            self.thread.join()

    def do(self, work: Callable[[], None]) -> None:
        start = time.perf_counter()
        self._raise()
        self.work.put(work)
        self._raise()
        self.full += time.perf_counter() - start

    def finish(self) -> None:
        """Wait until all is done."""
        self.work.put(None)
        self.thread.join()
        self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        while True:
            start = time.perf_counter()
            work = self.work.get()
            self.idle += time.perf_counter() - start
            if work is None:
                return
            if self.error is None:
                try:
                    work()
                except BaseException as error:
                    self.error = error
