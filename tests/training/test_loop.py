"""Whole runs of a tiny model: logs, validation, learning, and what is refused."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from refusion.checkpoint import load
from refusion.errors import ConfigError, RefusionError
from refusion.training import loop, state
from refusion.training.log import RunLog
from refusion.training.loop import Interrupted, TrainResult, make_optimizer, only_run, open_trainer, train
from refusion.training.prepare import prepare
from refusion.training.recipe import Recipe, load_recipe, recipe_from_dict
from refusion.training.state import checkpoints, read_progress
from refusion.training.validate import validate

Make = Callable[..., Recipe]
Whole = tuple[Recipe, TrainResult]
EVERY_STEP = "run.checkpoint_every_minutes=1e-9"
ROOT = Path(__file__).parents[2]


def out(recipe: Recipe) -> Path:
    return Path(recipe.run.out)


def test_a_run(make_recipe: Make, look: Any) -> None:
    recipe = make_recipe("run.validate_every=4", "optim.total_tokens=700")
    result = train(recipe)
    steps = look.records(recipe)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    seen = 0
    for step in steps:
        seen += step["tokens"]
        assert step["tokens_seen"] == seen and 60 <= step["tokens"] < 120
        assert {"ar", "mdm", "grad_norm", "lr", "seconds", "memory_mb", "time"} <= step.keys()
        assert step["ar"] > 0 and step["mdm"] > 0 and step["grad_norm"] > 0 and step["memory_mb"] > 10
    assert seen >= 700 > seen - steps[-1]["tokens"]
    assert steps[0]["lr"] == pytest.approx(1.5e-3) and steps[1]["lr"] > steps[-1]["lr"]
    assert result.model.is_dir() and result.progress.tokens == seen and result.progress.step == len(steps)
    assert result.progress.seconds == pytest.approx(sum(step["seconds"] for step in steps))
    # checkpoint
    assert result.folder == out(recipe) / "checkpoints" / f"step_{len(steps):07d}"
    assert [(r["step"], r["path"]) for r in look.records(recipe, "checkpoint")] == [(len(steps), str(result.folder))]
    assert recipe_from_dict(read_progress(result.folder)[1]) == recipe
    trained = load(result.folder)
    assert trained.config.mask_token_id is not None and trained.config.vocab_size == 64
    # validation
    found = look.records(recipe, "validation")
    assert [record["step"] for record in found] == [*range(4, len(steps), 4), len(steps)]
    held_out = prepare(recipe, recipe.model.source).held_out
    assert len(held_out) == 3
    wanted = validate(trained.transformer, trained.transformer, held_out, 30, torch.float32)
    assert result.validation == wanted
    assert {key: found[-1][key] for key in dataclasses.asdict(wanted)} == dataclasses.asdict(wanted)


def test_it_learns(make_recipe: Make, look: Any) -> None:
    train(make_recipe("optim.total_tokens=15000", "optim.batch_tokens=200", "optim.micro_tokens=200", "optim.lr=1e-2"))
    steps = look.records(make_recipe())
    first, last = steps[:5], steps[-10:]
    for part in ("ar", "mdm"):
        assert sum(s[part] for s in last) / 10 < 0.5 * sum(s[part] for s in first) / 5


def test_micro_batches_don_t_matter(make_recipe: Make, whole: Whole, look: Any) -> None:
    recipe = make_recipe("optim.micro_tokens=60")
    train(recipe)
    assert [s[:2] for s in look.course(recipe)] == [s[:2] for s in look.course(whole[0])]
    assert [s[2:5] for s in look.course(recipe)] == [pytest.approx(s[2:5], rel=1e-3) for s in look.course(whole[0])]


@pytest.mark.parametrize("setting", ["run.precision=bfloat16", "model.dtype=bfloat16"])
def test_bfloat16_runs_are_close_and_resume(
    setting: str, make_recipe: Make, whole: Any, at_step: Any, look: Any
) -> None:
    recipe = make_recipe(setting)
    at_step(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted):
        train(recipe)
    result = train(recipe, resume=True)
    assert load(result.folder, dtype=torch.bfloat16).transformer.dtype == torch.bfloat16
    found, exact = look.course(recipe)[:3], look.course(whole[0])[:3]
    assert [step[2:4] for step in found] == [pytest.approx(step[2:4], rel=0.05) for step in exact]


def test_without_held_out_rows_nothing_is_validated(make_recipe: Make, look: Any) -> None:
    for setting in ("data.held_out=0", "run.validation_rows=0"):
        recipe = make_recipe(setting, "run.validate_every=2", f"run.out={make_recipe().run.out}-{setting}")
        result = train(recipe)
        assert result.model.is_dir() and result.validation is None and look.records(recipe, "validation") == []


def test_held_out_rows_that_are_all_too_long_don_t_stop_the_run(make_recipe: Make, caplog: Any) -> None:
    recipe = make_recipe("data.max_length=8", "data.over_long=cut")
    assert train(recipe).validation is None
    assert "no validation: all 4 held-out rows are longer than data.max_length" in caplog.text


def test_without_a_gpu_it_runs_on_the_cpu(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trainer = open_trainer(make_recipe(), resume=False)
    trainer.step()
    assert trainer.transformer.device == torch.device("cpu")
    assert {value.device.type for values in trainer.optimizer.state.values() for value in values.values()} == {"cpu"}


def test_weight_decay_is_for_matrices_only(make_recipe: Make) -> None:
    recipe = make_recipe("optim.weight_decay=0.3")
    checkpoint = prepare(recipe, recipe.model.source).checkpoint
    groups = make_optimizer(checkpoint, recipe).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in checkpoint.transformer.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name or "bias" in name else 0.3)


# ---- refusals


def test_a_used_folder_needs_resume(make_recipe: Make) -> None:
    recipe = make_recipe()
    train(recipe)
    before = (out(recipe) / "log.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"already holds a run; give --resume .* or name another run.out"):
        train(recipe)
    assert (out(recipe) / "log.jsonl").read_bytes() == before


@pytest.mark.parametrize("change", [
    "noise.slot_sizes=[2,8]", "noise.past_end_slots=0", "loss.mdm_weight=0.5", "loss.mdm_normalizer=mean",
    "optim.batch_tokens=70", "optim.weight_decay=0.5", "optim.betas=[0.9,0.99]", "data.held_out=3",
    "data.max_length=32", "data.sources.0.strip_calculator=true", "model.dtype=bfloat16", "run.seed=4",
])
def test_another_recipe_is_refused(change: str, make_recipe: Make) -> None:
    recipe = make_recipe()
    open_trainer(recipe, resume=False).save()
    place = ".".join(change.split("=")[0].split(".")[:2])
    with pytest.raises(ConfigError, match=rf"was trained with .*{place}.*resume with the same"):
        open_trainer(make_recipe(change), resume=True)


@pytest.mark.parametrize("change", [
    "optim.total_tokens=900", "optim.lr=1e-4", "optim.schedule=constant", "optim.clip_norm=2", "optim.micro_tokens=60",
    "run.log_every=3", "run.validate_every=2", "run.keep_checkpoints=1", "run.precision=bfloat16", "run.threads=2",
])
def test_what_may_change_on_a_resume(change: str, make_recipe: Make) -> None:
    recipe = make_recipe()
    open_trainer(recipe, resume=False).save()
    assert open_trainer(make_recipe(change), resume=True).progress.step == 0


def test_recipes_survive_their_checkpoint(make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped recipes, and one with values that JSON has no word for, are taken for themselves after a resume."""
    (tmp_path / "gsm8k_train.jsonl").write_text("")
    monkeypatch.setenv("REFUSION_DATA", str(tmp_path))
    recipes = [load_recipe(path) for path in sorted((ROOT / "recipes").glob("smollm2_*.yaml"))]
    assert recipes
    odd = make_recipe().to_dict()
    options = {1: datetime.date(2026, 1, 2), "b": (1, 2)}
    odd["data"]["sources"] = [{"kind": "gym", "name": "x", "size": 3, "options": options}]
    for values in [*(recipe.to_dict() for recipe in recipes), recipe_from_dict(odd).to_dict()]:
        loop._check_same(json.loads(json.dumps(values, default=str)), values, tmp_path)


def test_a_gradient_that_isn_t_finite_stops_the_run(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch, look: Any
) -> None:
    recipe = make_recipe(EVERY_STEP)
    original, calls = loop.hybrid_loss, []

    def poisoned(*arguments: Any) -> Any:
        loss = original(*arguments)
        calls.append(loss)
        return dataclasses.replace(loss, total=loss.total * float("nan")) if len(calls) == 8 else loss

    monkeypatch.setattr(loop, "hybrid_loss", poisoned)
    with pytest.raises(RefusionError, match=r"the gradient of step \d+ is not finite; lower optim.lr and resume"):
        train(recipe)
    found = checkpoints(out(recipe) / "checkpoints")[-1]
    assert all(bool(value.isfinite().all()) for value in look.weights(found).values())
    assert read_progress(found)[0].step == len(look.records(recipe)) >= 2
    assert train(make_recipe(EVERY_STEP, "optim.lr=1e-3"), resume=True).model.is_dir()


def test_folders_that_can_t_be_used(make_recipe: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"run.out, .*file/run, can't be made"):
        train(make_recipe(f"run.out={tmp_path / 'file' / 'run'}"))
    (tmp_path / "run" / "log.jsonl").mkdir(parents=True)
    with pytest.raises(RefusionError, match=r"the log .*log.jsonl can't be written: Is a directory"):
        train(make_recipe())


def test_a_log_that_can_t_be_written_is_named(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe()
    log = RunLog(out(recipe), recipe, state.Progress())
    log._file.close()
    monkeypatch.setattr(log, "_file", open("/dev/full", "w"))  # noqa: SIM115
    with pytest.raises(RefusionError, match="log.jsonl can't be written: No space left on device; free the disk"):
        train(recipe, log=log)


def test_models_that_can_t_be_trained(make_recipe: Make) -> None:
    with pytest.raises(ConfigError, match="data.max_length is 200, .* has 128 positions"):
        train(make_recipe("data.max_length=200"))


def test_a_second_training_in_the_same_folder_is_refused(make_recipe: Make) -> None:
    recipe = make_recipe()
    with only_run(out(recipe)), pytest.raises(ConfigError, match="another training holds"):
        train(recipe)
    assert train(recipe).model.is_dir()
