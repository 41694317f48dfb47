"""Many sequences at once: admit, step, finish.

The engine speaks token ids. Each live row is an algorithm's generator waiting for a reading;
a step gathers what all of them ask for, packs the tokens without padding, runs one forward
pass and resumes every generator. Rows join and leave between any two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from refusion.decoding.contract import Algorithm, Answer, Event, Reading, Row, Step
from refusion.engine.reading import Asked, read, split_readings
from refusion.errors import CapacityError
from refusion.model.cache import Cache
from refusion.model.transformer import Segment, Transformer
from refusion.model.visibility import attention_mask


@dataclass
class Finished:
    """A sequence that is done.

    forwards: passes after the prompt's (those whose kind isn't "prompt"). seconds and
    first_token_seconds count from admission. events: as yielded, with the pass they followed.
    """

    ticket: int
    answer: Answer
    forwards: int
    seconds: float
    first_token_seconds: float
    events: list[tuple[int, float, Event]]


@dataclass
class _Live:
    ticket: int
    index: int
    algorithm: Algorithm
    step: Step | None
    started: float
    record: bool
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
    """Runs up to `rows` sequences together over one preallocated cache.

    capacity: cells per row at the start; a row that needs more makes all rows grow.
    """

    def __init__(self, transformer: Transformer, rows: int = 8, capacity: int = 512) -> None:
        config = transformer.config
        self.transformer, self.config = transformer, config
        self.cache = Cache(config, rows, capacity, transformer.dtype, transformer.device)
        self._free = list(range(rows))[::-1]
        self._live: list[_Live] = []
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

    def admit(self, start: Callable[[Row], Algorithm], *, cells: int = 0, record: bool = False) -> int:
        """Takes a sequence in; returns its ticket.

        start: makes the algorithm for its row. cells: how many the row is expected to need.
        record: keep the algorithm's events.

        Raises:
            CapacityError: no row is free.
        """
        if not self._free:
            raise CapacityError(f"all {self.cache.rows} rows are taken; wait for one to finish")
        self.cache.reserve(cells)
        index = self._free[-1]
        self.cache.clear(index)
        row = EngineRow(self.cache, index)
        live = _Live(self._tickets, index, start(row), None, time.perf_counter(), record)
        self._free.pop()
        self._tickets += 1
        self._live.append(live)
        return live.ticket

    def cancel(self, ticket: int) -> bool:
        """Drops a live sequence and frees its row; False if it isn't there (any more)."""
        for live in self._live:
            if live.ticket == ticket:
                live.algorithm.close()
                self._release(live)
                return True
        return False

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """One forward pass for all live rows; returns those that are done."""
        finished = [done for live in list(self._live) if live.step is None and (done := self._resume(live, None))]
        waiting = [live for live in self._live if live.step is not None]
        if not waiting:
            return finished
        steps = [live.step for live in waiting if live.step is not None]
        readings = self._forward(waiting, steps)
        for live, step, reading in zip(waiting, steps, readings, strict=True):
            live.passes += 1
            live.forwards += step.kind != "prompt"
            if done := self._resume(live, reading):
                finished.append(done)
        return finished

    def run(self) -> list[Finished]:
        """Steps until no row is live."""
        finished = []
        while self._live:
            finished += self.step()
        return finished

    def _forward(self, waiting: Sequence[_Live], steps: Sequence[Step]) -> list[Reading]:
        device, config = self.transformer.device, self.config
        lengths = [self.cache.lengths[live.index] for live in waiting]
        self.cache.reserve(max(length + len(step.tokens) for length, step in zip(lengths, steps, strict=True)))
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        starts: list[int] = []
        for live, step in zip(waiting, steps, strict=True):
            start, count = len(tokens), len(step.tokens)
            tokens += step.tokens
            positions += step.positions
            starts.append(start)
            mask = attention_mask(
                self.cache.lengths[live.index], count, step.groups, step.bidirectional,
                config.group_size, self.transformer.dtype, device, step.parents,
            )
            segments.append(Segment(live.index, start, start + count, mask))
        hidden = self.transformer.step(
            torch.tensor(tokens, device=device), torch.tensor(positions, device=device), self.cache, segments
        )
        asked = Asked.of(steps, starts)
        if not asked.cells:
            return split_readings([[]] * 5, steps)
        logits = self.transformer.project(hidden[torch.tensor(asked.cells, device=device)])
        return split_readings(read(logits, asked, self._banned).tolist(), steps)

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
            return Finished(live.ticket, end.value, live.forwards, now, first, live.events)
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
        self._free.append(live.index)
