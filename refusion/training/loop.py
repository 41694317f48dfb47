"""The training loop: steps of noised examples, logs, validation, checkpoints, resume."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refusion.checkpoint import Checkpoint, load, save
from refusion.errors import ConfigError, RefusionError
from refusion.training import schedule, state
from refusion.training.batches import Counts, micro_batches
from refusion.training.log import RunLog
from refusion.training.lora import write_lora
from refusion.training.loss import hybrid_loss
from refusion.training.noise import Noised
from refusion.training.plan import StepPlan
from refusion.training.prepare import Prepared, prepare
from refusion.training.recipe import Recipe
from refusion.training.state import Progress
from refusion.training.validate import Validation, validate

try:
    import fcntl
except ImportError:  # not on Windows, where a run's folder isn't held
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """One optimiser step: both losses, gradient norm before clipping, learning rate, tokens, seconds."""

    ar: float
    mdm: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    folder: the last checkpoint. model: the exported model. validation: the last one, if there are held-out rows.
    """

    folder: Path
    model: Path
    progress: Progress
    validation: Validation | None


class Interrupted(RefusionError):
    """The run was stopped by a signal, after its last step was saved."""


class Trainer:
    """Owns the model, the optimiser and the place in the data of one run."""

    def __init__(self, recipe: Recipe, prepared: Prepared, progress: Progress) -> None:
        self.recipe, self.progress = recipe, progress
        self.checkpoint: Checkpoint = prepared.checkpoint
        self.plan: StepPlan = prepared.plan
        self.held_out: list[Noised] = prepared.held_out
        self.base = prepared.base
        self.optimizer = make_optimizer(prepared.checkpoint, recipe)
        self.precision = torch.bfloat16 if recipe.run.precision == "bfloat16" else torch.float32
        self.forward: Callable[[Tensor, Tensor, Tensor | None], Tensor] = prepared.checkpoint.transformer
        if recipe.run.compile:
            for layer in prepared.checkpoint.transformer.layers:  # one graph serves all of them
                layer.compile(dynamic=True)

    @property
    def transformer(self) -> Any:
        return self.checkpoint.transformer

    @property
    def finished(self) -> bool:
        """Whether the token budget is used up."""
        return self.progress.tokens >= self.recipe.optim.total_tokens

    def step(self) -> StepResult:
        """One optimiser step: the examples at the present place, forward, backward, update."""
        started = time.perf_counter()
        examples, following = self.plan.step(self.progress.place)
        counts = Counts.of(examples)
        optim, loss_config = self.recipe.optim, self.recipe.loss
        share = self.progress.tokens / optim.total_tokens
        factor = schedule.factor(
            optim.schedule, self.progress.step, share, optim.warmup_steps, optim.decay_fraction
        )
        for group in self.optimizer.param_groups:
            group["lr"] = optim.lr * factor
        ar = mdm = 0.0
        device = self.transformer.device
        for batch in micro_batches(examples, optim.micro_tokens):
            with torch.autocast(device.type, self.precision, enabled=self.precision != torch.float32):
                loss = hybrid_loss(
                    self.transformer, self.forward, batch.to(device), counts,
                    loss_config.mdm_weight, loss_config.mdm_normalizer,
                )
            loss.total.backward()
            ar, mdm = ar + float(loss.ar), mdm + float(loss.mdm)
        trained = [p for p in self.transformer.parameters() if p.requires_grad]
        norm = float(torch.nn.utils.clip_grad_norm_(trained, optim.clip_norm))
        if norm != norm or norm == float("inf"):
            self.optimizer.zero_grad(set_to_none=True)
            raise RefusionError(
                f"the gradient of step {self.progress.step} is not finite; "
                "lower optim.lr and resume from the last checkpoint"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        self.progress = Progress(
            self.progress.step + 1, self.progress.tokens + counts.tokens, self.progress.seconds + seconds, following
        )
        return StepResult(ar, mdm, norm, optim.lr * factor, counts.tokens, seconds)

    def validate(self) -> Validation | None:
        """Losses on the held-out rows, or None where there are none."""
        if not self.held_out:
            return None
        return validate(
            self.transformer, self.forward, self.held_out, self.recipe.optim.micro_tokens, self.precision,
            self.recipe.loss.mdm_normalizer,
        )

    def save(self) -> Path:
        """Writes a checkpoint of the present state."""
        return state.write_checkpoint(
            Path(self.recipe.run.out) / "checkpoints", self.checkpoint, self.optimizer,
            self.progress, self.recipe.to_dict(), self.recipe.run.keep_checkpoints,
            self._write_adapter if self.base else None,
        )

    def export(self) -> Path:
        """Writes the model alone to `run.out/model`, for use and for sharing; an adapter to `run.out/adapter` too.

        The adapter is rounded to lora.dtype, and the model is the base that it was added to.
        """
        out, source = Path(self.recipe.run.out), self.checkpoint
        if self.base:
            adapter = self._write_adapter(out / "adapter", getattr(torch, self.recipe.lora.dtype))
            source = load(self.recipe.model.source, dtype=self.transformer.dtype, adapter=adapter)
        return save(source, out / "model")

    def _write_adapter(self, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
        assert self.base is not None
        limit = self.recipe.lora.max_shard_bytes or None
        return write_lora(self.checkpoint, self.recipe.lora, self.base, folder, dtype=dtype, max_shard_bytes=limit)


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Makes a run's folder and holds it for this process; the system lets go of it when the process ends.

    Raises:
        ConfigError: the folder can't be made, or another training holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115 - held by the with below
    except OSError as error:
        raise ConfigError(f"run.out, {folder}, can't be made: {error.strerror or error}") from error
    with lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another training holds {folder}; wait for it or name another run.out") from None
        yield


def make_optimizer(checkpoint: Checkpoint, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only, never on norms and biases."""
    optim = recipe.optim
    parameters = [p for p in checkpoint.transformer.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def open_trainer(recipe: Recipe, *, resume: bool) -> Trainer:
    """A trainer at the start, or at the newest checkpoint of `run.out`.

    Raises:
        ConfigError: there is a run in the folder and resume isn't asked for, or the recipe differs from
            the one that the run began with in more than its length, logs and checkpoints.
    """
    folder = Path(recipe.run.out)
    found = state.checkpoints(folder / "checkpoints")
    if found and not resume:
        raise ConfigError(f"{folder} already holds a run; give --resume to go on with it or name another run.out")
    if not found:
        return Trainer(recipe, prepare(recipe, recipe.model.source), Progress())
    newest = found[-1]
    progress, old = state.read_progress(newest)
    _check_same(old, recipe.to_dict(), newest)
    trainer = Trainer(recipe, prepare(recipe, str(newest)), progress)
    state.read_optimizer(newest, trainer.checkpoint, trainer.optimizer)
    logger.info("resumed %s at step %d, %d tokens", newest, progress.step, progress.tokens)
    return trainer


_MAY_CHANGE = {"run": None, "optim": {"total_tokens", "decay_fraction", "micro_tokens", "lr", "schedule", "clip_norm"}}


def _check_same(old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    new = json.loads(json.dumps(new, default=str))  # as the checkpoint keeps it
    for section, values in new.items():
        free = _MAY_CHANGE.get(section, set())
        if free is None:
            if values.get("seed") != old.get(section, {}).get("seed"):
                raise ConfigError(f"{path} was trained with another run.seed; resume with the same one")
            continue
        for key, value in values.items():
            before = old.get(section, {}).get(key, value)
            if key not in free and before != value:
                raise ConfigError(
                    f"{path} was trained with {section}.{key} = {before}, now it is {value}; resume with the same value"
                )


def train(recipe: Recipe, *, resume: bool = False, log: RunLog | None = None) -> TrainResult:
    """Runs a recipe to its token budget; SIGINT and SIGTERM save first and then stop.

    Raises:
        Interrupted: a signal came; everything up to the last step is saved.
        RefusionError: bad data, settings, files, or a gradient that isn't finite.
    """
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    with only_run(Path(recipe.run.out)):
        return _run(recipe, resume, log)


def _run(recipe: Recipe, resume: bool, log: RunLog | None) -> TrainResult:
    trainer = open_trainer(recipe, resume=resume)
    run = recipe.run
    log = log or RunLog(Path(run.out), recipe, trainer.progress)
    asked_to_stop: list[int] = []
    previous = {s: signal.signal(s, lambda number, _: asked_to_stop.append(number)) for s in _signals()}
    validation: Validation | None = None
    last_save = time.monotonic()
    try:
        with log:
            while not trainer.finished and not asked_to_stop:
                result = trainer.step()
                log.step(trainer.progress, result)
                if trainer.finished or asked_to_stop:
                    break
                if trainer.progress.step % run.validate_every == 0:
                    _validate(trainer, log)
                if time.monotonic() - last_save > 60 * run.checkpoint_every_minutes:
                    log.saved(trainer.progress, trainer.save())
                    last_save = time.monotonic()
            folder = trainer.save()  # before the validation, which may take longer than a killer waits
            log.saved(trainer.progress, folder)
            if trainer.finished:
                model = trainer.export()
                validation = _validate(trainer, log)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if not trainer.finished:
        raise Interrupted(f"stopped at step {trainer.progress.step}, saved in {folder}; go on with --resume")
    return TrainResult(folder, model, trainer.progress, validation)


def _validate(trainer: Trainer, log: RunLog) -> Validation | None:
    found = trainer.validate()
    if found is not None:
        log.validation(trainer.progress, found)
    return found


def _signals() -> tuple[signal.Signals, ...]:
    if threading.current_thread() is not threading.main_thread():
        return ()
    return (signal.SIGINT, signal.SIGTERM)

