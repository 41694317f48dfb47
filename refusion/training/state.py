"""Checkpoints of a training: a loadable model folder plus what a resume needs, written atomically."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from refusion.checkpoint import Checkpoint, save
from refusion.errors import CheckpointError
from refusion.training.plan import Place

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "training.json"


@dataclass
class Progress:
    """How far a run is: optimiser steps done, tokens seen, seconds of work, and where the next step begins."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    place: Place = dataclasses.field(default_factory=Place)


def write_checkpoint(
    folder: Path,
    checkpoint: Checkpoint,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    recipe: dict[str, Any],
    keep: int,
    write: Callable[[Path], Path] | None = None,
) -> Path:
    """Writes `folder/step_N` beside its place and renames it; then removes all but the newest `keep`.

    Does nothing where this very state was already written. write: writes what is trained to a folder; None: the
    whole model.

    Raises:
        CheckpointError: the disk is full or can't be written; earlier checkpoints are untouched.
    """
    target = folder / f"step_{progress.step:07d}"
    partial, replaced = folder / f".partial-{target.name}", folder / f"{target.name}.old"
    # default: YAML dates among a generator's options
    body = json.dumps({"progress": dataclasses.asdict(progress), "recipe": recipe}, indent=1, default=str)
    if _text(target / STATE_FILE) == body:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".*step_*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        write(partial) if write else save(checkpoint, partial)
        save_file(_optimizer_tensors(checkpoint, optimizer), partial / OPTIMIZER_FILE)
        (partial / STATE_FILE).write_text(body, encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            _flush(path)
        if target.exists():  # renamed, not removed: a kill right here must not lose it
            _remove(replaced)
            os.replace(target, replaced)
        os.replace(partial, target)
        _flush(folder)
    except (OSError, SafetensorError, CheckpointError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = error.__cause__ if isinstance(error, CheckpointError) and error.__cause__ else error
        raise CheckpointError(
            f"the checkpoint {target} can't be written ({reason}), earlier ones are kept; "
            "free the disk and go on with --resume"
        ) from error
    _remove(replaced)
    for old in checkpoints(folder)[:-keep]:
        _remove(old)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step_*") if (path / STATE_FILE).is_file())


def read_progress(path: Path) -> tuple[Progress, dict[str, Any]]:
    """Progress and recipe of a checkpoint.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        body = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        fields, recipe = dict(body["progress"]), body["recipe"]
        progress = Progress(**{**fields, "place": Place(**fields["place"])})
        numbers = (progress.step, progress.tokens, progress.seconds, progress.place.epoch, progress.place.index)
        if not all(isinstance(number, (int, float)) and number >= 0 for number in numbers):
            raise ValueError("its progress isn't made of numbers")
        if not (isinstance(recipe, dict) and all(isinstance(section, dict) for section in recipe.values())):
            raise ValueError("its recipe isn't made of sections")
        return progress, recipe
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path / STATE_FILE} can't be read ({error}); delete {path} to go on from an earlier checkpoint"
        ) from error


def read_optimizer(path: Path, checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> None:
    """Puts the saved moments into a fresh optimiser of the same parameters.

    Raises:
        CheckpointError: the file is missing, damaged or of another model.
    """
    file = path / OPTIMIZER_FILE
    mend = f"delete {path} to go on from an earlier checkpoint"
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} can't be read ({error}); {mend}") from error
    for name, parameter in _trained(checkpoint):
        try:
            state = {key: tensors[f"{name}.{key}"] for key in ("exp_avg", "exp_avg_sq", "step")}
        except KeyError as error:
            raise CheckpointError(f"{file} lacks {error}; {mend}") from None
        if state["exp_avg"].shape != parameter.shape or state["exp_avg_sq"].shape != parameter.shape:
            raise CheckpointError(f"{file} holds {name} in another shape than the model; {mend}")
        # the fused AdamW wants its step count on the device too; copies, since these are maps of the file
        optimizer.state[parameter] = {key: value.to(parameter.device, copy=True) for key, value in state.items()}


def _optimizer_tensors(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trained(checkpoint):
        state = optimizer.state.get(parameter)
        if not state:
            state = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter),
                     "step": torch.tensor(0.0)}
        for key in ("exp_avg", "exp_avg_sq", "step"):
            tensors[f"{name}.{key}"] = state[key].detach().contiguous()
    return tensors


def _trained(checkpoint: Checkpoint) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in checkpoint.transformer.named_parameters() if p.requires_grad]


def _flush(path: Path) -> None:
    """Flushes a file or a folder's list of names to the disk, so that a rename never names lost data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Deletes a checkpoint; renamed first, since a half-deleted one must not be taken for a whole one."""
    doomed = path.with_name(f".{path.name}.removed")
    with suppress(OSError):
        os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
