"""Times of variants that take turns, and tables and files of what was found."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from refusion.model.transformer import Transformer

WARM_UP = 3
Run = Callable[[], object]
Row = dict[str, Any]


class Clock:
    """Milliseconds of a run: CUDA events on a GPU, a wall clock elsewhere. Nothing is pending before or behind it.

    wall: the wall clock on a GPU too, for runs whose work on the host counts.
    """

    def __init__(self, device: torch.device, wall: bool = False) -> None:
        self.device = device
        self._events = device.type == "cuda" and not wall

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __call__(self, run: Run) -> float:
        self.synchronize()
        if not self._events:
            began = time.perf_counter()
            run()
            self.synchronize()
            return (time.perf_counter() - began) * 1000
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)


class Budget:
    """Seconds that may be spent; math.inf sets no limit."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()

    def share(self, part: float) -> Budget:
        """A budget of a part of what is left."""
        return Budget(self.left * part)


@dataclass
class Series:
    """Milliseconds of one variant by round. note: why there are none, or fewer than asked."""

    times: list[float] = field(default_factory=list)
    note: str = ""

    def row(self) -> Row:
        """Median, quartiles and count, and the note if there is one."""
        found: Row = spread(self.times) if self.times else {}
        return found | ({"note": self.note} if self.note else {})


def spread(values: Sequence[float], name: str = "milliseconds") -> Row:
    """Median and quartiles of one value or more, and how many there were."""
    low, median, high = values[0], values[0], values[0]
    if len(values) > 1:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {name: median, "quartiles": [low, high], "repeats": len(values)}


def in_turns(
    clock: Clock, runs: dict[str, Run], repeats: int, budget: Budget | None = None, warm_up: int = WARM_UP
) -> dict[str, Series]:
    """Times every variant once a round, beginning with another one each round.

    A variant that fails is noted and left out from then on. Where the budget doesn't hold
    another round, the rounds end and the series say so.
    """
    found = {name: Series() for name in runs}
    live = dict(runs)
    longest = 0.0
    for turn in range(-warm_up, repeats):
        if budget is not None and budget.left < longest:
            for name in live:
                found[name].note = f"stopped after {max(turn, 0)} of {repeats} rounds: the time budget is spent"
            return found
        began = time.perf_counter()
        for name in _turn(list(live), turn):
            try:
                milliseconds = clock(live[name])
            except Exception as error:
                found[name].note = reason(error)
                del live[name]
                continue
            if turn >= 0:
                found[name].times.append(milliseconds)
        # a variant's first run may compile: it says nothing about the rounds to come
        longest = time.perf_counter() - began if turn > -warm_up else 0.0
    return found


def _turn(names: list[str], turn: int) -> list[str]:
    at = turn % max(len(names), 1)
    return names[at:] + names[:at]


def reason(error: BaseException) -> str:
    """One line on why something failed; memory that it held is given back."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # a broken context can't even do that
            torch.cuda.empty_cache()
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def describe(transformer: Transformer) -> Row:
    """What the times were taken on."""
    device = transformer.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": str(device), "machine": name, "threads": torch.get_num_threads(), "torch": torch.__version__,
        "dtype": str(transformer.dtype).removeprefix("torch."), "config": asdict(transformer.config),
    }


def show(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Prints rows as an aligned table without columns that no row fills; notes stand behind."""
    used = [c for c in columns if any(c in row for row in rows)]
    cells = [used, *([_cell(row.get(c)) for c in used] for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(used))]
    notes = ["", *(str(row.get("note", "")) for row in rows)]
    for line, note in zip(cells, notes, strict=True):
        text = "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print(f"{text}  {note}".rstrip(), flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " to ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return "-" if value is None else str(value)


def write(path: Path | None, found: Row) -> None:
    """Writes a JSON file whole: beside it first, then renamed, so that a cut leaves the one before."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)
