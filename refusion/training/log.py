"""What a run shows and keeps: a progress bar on a terminal, plain lines elsewhere, JSONL always."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from refusion.errors import RefusionError
from refusion.training.recipe import Recipe
from refusion.training.state import Progress
from refusion.training.validate import Validation

LOG_FILE = "log.jsonl"


class RunLog:
    """Appends one JSON object per step, validation and checkpoint to `folder/log.jsonl`.

    Records of steps after `progress` are removed: a resumed run does those steps again.
    """

    def __init__(self, folder: Path, recipe: Recipe, progress: Progress, console: Console | None = None) -> None:
        self._path = folder / LOG_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _rewind(self._path, progress.step)
            self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise RefusionError(f"the log {self._path} can't be written: {error.strerror or error}") from error
        self._total, self._every = recipe.optim.total_tokens, recipe.run.log_every
        self._console = console or Console(stderr=True)
        self._recent: deque[Any] = deque(maxlen=max(self._every, 1))
        self._bar = Bar(
            TextColumn("step {task.fields[step]}"), BarColumn(), TextColumn("{task.percentage:>4.1f}%"),
            TextColumn("AR {task.fields[ar]:.3f}  MDM {task.fields[mdm]:.3f}  {task.fields[speed]:.0f} tok/s"),
            TimeRemainingColumn(), console=self._console, disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(
            "train", total=self._total, completed=progress.tokens, step=progress.step, ar=0.0, mdm=0.0, speed=0.0
        )

    def __enter__(self) -> RunLog:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        with suppress(OSError):  # a full disk was reported by the record that it hit
            self._file.close()

    def step(self, progress: Progress, result: Any) -> None:
        """Records a step (a refusion.training.loop.StepResult) and shows means over the last ones."""
        self._recent.append(result)
        tokens, seconds = sum(r.tokens for r in self._recent), sum(r.seconds for r in self._recent)
        speed = tokens / max(seconds, 1e-9)
        ar = sum(r.ar for r in self._recent) / len(self._recent)
        mdm = sum(r.mdm for r in self._recent) / len(self._recent)
        self._write("step", progress, **dataclasses.asdict(result), memory_mb=_peak_memory_mb())
        self._bar.update(self._task, completed=progress.tokens, step=progress.step, ar=ar, mdm=mdm, speed=speed)
        if not self._console.is_terminal and progress.step % self._every == 0:
            left = (self._total - progress.tokens) / max(speed, 1e-9)
            self._line(
                f"step {progress.step}  {progress.tokens:,}/{self._total:,} tokens  AR {ar:.3f}  MDM {mdm:.3f}  "
                f"norm {result.grad_norm:.2f}  lr {result.lr:.2e}  {speed:.0f} tok/s  {left / 60:.0f} min left"
            )

    def validation(self, progress: Progress, found: Validation) -> None:
        """Records and shows a validation."""
        self._write("validation", progress, **dataclasses.asdict(found))
        shares = " ".join("-" if s is None else f"{s:.2f}" for s in found.right_by_depth[:8])
        self._line(
            f"step {progress.step}  validation  AR {found.ar:.3f}  MDM {found.mdm:.3f}  "
            f"next token right {found.right_next:.2f}, masks by distance {shares}"
        )

    def saved(self, progress: Progress, path: Path) -> None:
        """Records and shows where a checkpoint went."""
        self._write("checkpoint", progress, path=str(path))
        self._line(f"saved {path}")

    def _line(self, text: str) -> None:
        self._bar.console.print(f"{time.strftime('%H:%M:%S')}  {text}", highlight=False, soft_wrap=True)

    def _write(self, kind: str, progress: Progress, **values: Any) -> None:
        record = {"kind": kind, "step": progress.step, "tokens_seen": progress.tokens, "time": time.time(), **values}
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            reason = error.strerror or error
            raise RefusionError(
                f"the log {self._path} can't be written: {reason}; free the disk and go on with --resume"
            ) from error


def _rewind(path: Path, step: int) -> None:
    """Removes the records after `step`, and a line that a crash cut short."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if _is_until(line, step)]
    if len(kept) < len(lines):
        fresh = path.with_name(f".{path.name}.partial")
        fresh.write_text("".join(kept), encoding="utf-8")
        os.replace(fresh, path)


def _is_until(line: str, step: int) -> bool:
    try:
        return line.endswith("\n") and json.loads(line)["step"] <= step
    except (ValueError, TypeError, KeyError):
        return False


def _peak_memory_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)
