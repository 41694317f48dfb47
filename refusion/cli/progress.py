"""How far a long command is: a bar on a terminal, a line every so often on a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Tell = Callable[[str, int, int], None]
"""Called with a phase, runs done and runs in all."""
STEPS = 10
"""Lines of a phase, about, where there is no terminal."""


@contextmanager
def progress(title: str) -> Iterator[Tell]:
    """What to call as the work goes on; everything goes to stderr."""
    if not sys.stderr.isatty():
        yield Lines(title, sys.stderr)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task(title, total=None)
        yield lambda phase, done, total: bar.update(row, description=f"{title}, {phase}", completed=done, total=total)


class Lines:
    """A line as a phase begins and at about every tenth of it, with the time it took and the time left."""

    def __init__(self, title: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._stream, self._clock = title, stream, clock
        self._phase = ""
        self._began = 0.0
        self._told = 0

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Prints a line if it is time for one."""
        now = self._clock()
        if phase != self._phase:
            self._phase, self._began, self._told = phase, now, done * STEPS // max(total, 1)
            self._print(f"{done} of {total}")
            return
        share = done * STEPS // max(total, 1)
        if share <= self._told or done < 1:
            return
        self._told = share
        elapsed = now - self._began
        left = f", about {clock(elapsed * (total - done) / done)} left" if done < total else ""
        self._print(f"{done} of {total}, {clock(elapsed)} so far{left}")

    def _print(self, text: str) -> None:
        print(f"{self._title}, {self._phase}: {text}", file=self._stream, flush=True)


def clock(seconds: float) -> str:
    """Minutes and seconds, and hours where there are some: 0:07, 12:05, 1:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
