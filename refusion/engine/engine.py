"""Many sequences at once: admit, step, finish.

The engine speaks token ids. Each live row is an algorithm's generator waiting for a reading;
a step gathers what all of them ask for, packs the tokens without padding, runs one forward
pass and resumes every generator. Rows join and leave between any two steps; sequences for
which there is no row or no memory wait in a queue.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from refusion.decoding.contract import Algorithm, Answer, Event, Reading, Row, Step
from refusion.engine.chunks import pieces
from refusion.engine.reading import Asked, read, split_readings
from refusion.errors import CapacityError
from refusion.model.cache import Cache
from refusion.model.transformer import Segment, Transformer
from refusion.model.visibility import attention_mask


@dataclass
class Finished:
    """A sequence that is done.

    forwards: passes after the prompt's (those whose kind isn't "prompt"). seconds and
    first_token_seconds count from admission, queued_seconds up to it. events: as yielded, with the
    pass they followed.
    """

    ticket: int
    answer: Answer
    forwards: int
    seconds: float
    first_token_seconds: float
    events: list[tuple[int, float, Event]]
    queued_seconds: float = 0.0


@dataclass(frozen=True)
class _Queued:
    ticket: int
    start: Callable[[Row], Algorithm]
    cells: int
    record: bool
    since: float


@dataclass
class _Live:
    ticket: int
    index: int
    algorithm: Algorithm
    step: Step | None
    started: float
    record: bool
    queued: float = 0.0
    fed: int = 0
    forwards: int = 0
    passes: int = 0
    first_token: float | None = None
    events: list[tuple[int, float, Event]] = field(default_factory=list)


class EngineRow:
    """A cache row as an algorithm sees it (refusion.decoding.contract.Row)."""

    def __init__(self, cache: Cache, index: int) -> None:
        self._cache, self._index = cache, index

    @property
    def committed(self) -> int:
        return self._cache.lengths[self._index]

    def commit(self, cells: Sequence[int]) -> None:
        self._cache.commit(self._index, cells)


class Engine:
    """Runs up to `rows` sequences together, each over its own cells of one cache.

    max_cells: cells that all rows together may hold, or None without a limit (one cell takes
        `engine.cache.bytes_per_cell`). What doesn't fit waits in the queue.
    chunk: tokens of prompts in one pass, at most; a longer prompt is fed in several passes, so
        that a pass's memory and the other rows' waiting stay bounded.
    """

    def __init__(
        self, transformer: Transformer, rows: int = 8, *, max_cells: int | None = None, chunk: int = 512
    ) -> None:
        if max_cells is not None and max_cells < 1:
            raise CapacityError(f"max_cells must be 1 or more, got {max_cells}")
        if chunk < 1:
            raise CapacityError(f"chunk must be 1 or more, got {chunk}")
        config = transformer.config
        self.transformer, self.config, self.max_cells, self.chunk = transformer, config, max_cells, chunk
        self.cache = Cache(config, rows, 0, transformer.dtype, transformer.device)
        self._free = list(range(rows))[::-1]
        self._live: list[_Live] = []
        self._queue: deque[_Queued] = deque()
        self._tickets = 0
        banned = torch.arange(config.vocab_size) >= config.num_tokens
        if config.mask_token_id is not None:
            banned[config.mask_token_id] = True
        self._banned = banned.to(transformer.device)

    @property
    def free_rows(self) -> int:
        return len(self._free)

    @property
    def live_rows(self) -> int:
        return len(self._live)

    @property
    def queued(self) -> int:
        """Sequences that wait for a row or for memory."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Whether nothing is live and nothing waits."""
        return not self._live and not self._queue

    def submit(self, start: Callable[[Row], Algorithm], *, cells: int = 0, record: bool = False) -> int:
        """Takes a sequence in as soon as there is a row and memory for it, in order of coming; returns its ticket.

        start: makes the algorithm for its row. cells: how many the row will need, at most; they are
        allocated at once (a row that turns out to need more grows). record: keep the algorithm's events.

        Raises:
            CapacityError: so many cells are never to be had.
        """
        if self.max_cells is not None and cells > self.max_cells:
            raise CapacityError(
                f"a sequence of {cells} cells is longer than the {self.max_cells} that the cache may hold; "
                "ask for a shorter answer, shorten the prompt or raise max_cells"
            )
        self._queue.append(_Queued(self._tickets, start, cells, record, time.perf_counter()))
        self._tickets += 1
        return self._tickets - 1

    def admit(self, start: Callable[[Row], Algorithm], *, cells: int = 0, record: bool = False) -> int:
        """As `submit`, for callers that keep their own queue.

        Raises:
            CapacityError: no row is free, others wait already, or there aren't enough cells now.
        """
        if self._queue or not self._free:
            raise CapacityError(f"all {self.cache.rows} rows are taken; wait for one to finish")
        if self.max_cells is not None and self.cache.cells + cells > self.max_cells:
            raise CapacityError(
                f"{self.cache.cells} of {self.max_cells} cells are taken and {cells} are wanted; "
                "wait for a row to finish or raise max_cells"
            )
        ticket = self.submit(start, cells=cells, record=record)
        self._fill()
        return ticket

    def _fill(self) -> None:
        """Moves sequences from the queue into free rows while memory lasts."""
        while self._queue and self._free:
            first = self._queue[0]
            if self.max_cells is not None and self.cache.cells + first.cells > self.max_cells:
                return
            self._queue.popleft()
            index, now = self._free[-1], time.perf_counter()
            algorithm = first.start(EngineRow(self.cache, index))
            self.cache.reserve(index, first.cells)
            self._free.pop()
            self._live.append(
                _Live(first.ticket, index, algorithm, None, now, first.record, queued=now - first.since)
            )

    def cancel(self, ticket: int) -> bool:
        """Drops a sequence, live or queued, and frees its row; False if it isn't there (any more)."""
        for waiting in self._queue:
            if waiting.ticket == ticket:
                self._queue.remove(waiting)
                return True
        for live in self._live:
            if live.ticket == ticket:
                live.algorithm.close()
                self._release(live)
                return True
        return False

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """One forward pass for the live rows; returns those that are done.

        Rows whose prompts don't fit into this pass wait for the next one.
        """
        self._fill()
        finished = [done for live in list(self._live) if live.step is None and (done := self._resume(live, None))]
        fed = [(live, size) for live, size in self._schedule() if size]
        if not fed:
            return finished
        for live, step, reading in self._forward(fed):
            live.forwards += step.kind != "prompt"
            if done := self._resume(live, reading):
                finished.append(done)
        return finished

    def run(self) -> list[Finished]:
        """Steps until nothing is live or queued."""
        finished = []
        while not self.idle:
            finished += self.step()
        return finished

    def _schedule(self) -> list[tuple[_Live, int]]:
        """How many tokens of its step each row feeds now: whole steps, but prompts share `chunk` tokens."""
        waiting = [live for live in self._live if live.step is not None]
        return list(zip(waiting, pieces([(live.step, live.fed) for live in waiting if live.step], self.chunk),
                        strict=True))

    def _forward(self, fed: Sequence[tuple[_Live, int]]) -> list[tuple[_Live, Step, Reading]]:
        """Feeds so many tokens of each row's step; readings of the steps that are complete now."""
        device, config = self.transformer.device, self.config
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        complete: list[tuple[_Live, Step]] = []
        starts: list[int] = []
        for live, size in fed:
            step, start, begin = live.step, len(tokens), live.fed
            assert step is not None
            stop, committed = begin + size, self.cache.lengths[live.index]
            self._reserve(live.index, committed + stop)
            tokens += step.tokens[begin:stop]
            positions += step.positions[begin:stop]
            parents = None if step.parents is None else [max(p - begin, -1) for p in step.parents[begin:stop]]
            groups = None if step.groups is None else step.groups[begin:stop]
            mask = attention_mask(
                committed + begin, size, groups, step.bidirectional, config.group_size, self.transformer.dtype,
                device, parents,
            )
            segments.append(Segment(live.index, start, start + size, mask, begin))
            live.passes += 1
            live.fed = stop
            if stop == len(step.tokens):
                live.fed = 0
                complete.append((live, step))
                starts.append(start - begin)
        hidden = self.transformer.step(
            torch.tensor(tokens, device=device), torch.tensor(positions, device=device), self.cache, segments
        )
        steps = [step for _, step in complete]
        asked = Asked.of(steps, starts)
        if asked.cells:
            logits = self.transformer.project(hidden[torch.tensor(asked.cells, device=device)])
            readings = split_readings(read(logits, asked, self._banned).tolist(), steps)
        else:
            readings = split_readings([[]] * 5, steps)
        return [(live, step, reading) for (live, step), reading in zip(complete, readings, strict=True)]

    def _reserve(self, row: int, cells: int) -> None:
        if cells > self.cache.capacity(row):  # nobody said how long it gets: grow by half, not cell by cell
            self.cache.reserve(row, max(cells, self.cache.capacity(row) * 3 // 2))

    def _resume(self, live: _Live, reading: Reading | None) -> Finished | None:
        """Runs a generator on to its next step; the finished sequence where it returns."""
        try:
            item = live.algorithm.send(reading)
            while isinstance(item, Event):
                self._note(live, item)
                item = live.algorithm.send(None)
            live.step = item
            return None
        except StopIteration as end:
            now = time.perf_counter() - live.started
            self._release(live)
            first = now if live.first_token is None else live.first_token
            return Finished(live.ticket, end.value, live.forwards, now, first, live.events, live.queued)
        except Exception:
            self._release(live)  # its generator is dead; the other rows can go on
            raise

    def _note(self, live: _Live, event: Event) -> None:
        now = time.perf_counter() - live.started
        if live.first_token is None and event.kind == "committed":
            live.first_token = now
        if live.record:
            live.events.append((live.passes, now, event))

    def _release(self, live: _Live) -> None:
        self._live.remove(live)
        self.cache.release(live.index)
        self._free.append(live.index)
