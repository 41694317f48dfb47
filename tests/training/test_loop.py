"""Whole runs of a tiny model: logs, validation, stops and resumes that change nothing, refusals."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from refusion.checkpoint import load
from refusion.errors import CheckpointError, ConfigError, RefusionError
from refusion.training import loop, state
from refusion.training.log import RunLog
from refusion.training.loop import Interrupted, Trainer, TrainResult, make_optimizer, open_trainer, train
from refusion.training.prepare import prepare
from refusion.training.recipe import Recipe, load_recipe, recipe_from_dict
from refusion.training.state import checkpoints, read_progress
from refusion.training.validate import validate

Make = Callable[..., Recipe]
EVERY_STEP = "run.checkpoint_every_minutes=1e-9"
ROOT = Path(__file__).parents[2]


def out(recipe: Recipe) -> Path:
    return Path(recipe.run.out)


def records(recipe: Recipe, kind: str = "step") -> list[dict[str, Any]]:
    lines = (out(recipe) / "log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def course(recipe: Recipe) -> list[tuple[float, ...]]:
    """What each step did, its seconds apart."""
    names = ("step", "tokens_seen", "ar", "mdm", "grad_norm", "lr", "tokens")
    return [tuple(record[name] for name in names) for record in records(recipe)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in load(folder).transformer.named_parameters()}


def same(first: Path, second: Path) -> bool:
    one, two = weights(first), weights(second)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def whole(recipe_at: Make, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, TrainResult]:
    """The run that nothing disturbs."""
    recipe = recipe_at(tmp_path_factory.mktemp("whole") / "run")
    return recipe, train(recipe)


def assert_as_whole(recipe: Recipe, result: TrainResult, whole: tuple[Recipe, TrainResult]) -> None:
    assert result.finished and course(recipe) == course(whole[0])
    assert same(result.folder, whole[1].folder)
    left, right = (read_progress(r.folder)[0] for r in (result, whole[1]))
    assert dataclasses.replace(left, seconds=0) == dataclasses.replace(right, seconds=0)


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """at_step(n, act): calls act inside the n-th step that this test makes, once its update is done."""

    def install(number: int, act: Callable[[], None]) -> None:
        original, made = Trainer.step, []

        def step(trainer: Trainer) -> Any:
            result = original(trainer)
            made.append(result)
            if len(made) == number:
                act()
            return result

        monkeypatch.setattr(Trainer, "step", step)

    return install


# ---- a whole run


def test_a_run(make_recipe: Make) -> None:
    recipe = make_recipe("run.validate_every=4", "optim.total_tokens=700")
    result = train(recipe)
    steps = records(recipe)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    seen = 0
    for step in steps:
        seen += step["tokens"]
        assert step["tokens_seen"] == seen and 60 <= step["tokens"] < 120
        assert {"ar", "mdm", "grad_norm", "lr", "seconds", "memory_mb", "time"} <= step.keys()
        assert step["ar"] > 0 and step["mdm"] > 0 and step["grad_norm"] > 0 and step["memory_mb"] > 10
    assert seen >= 700 > seen - steps[-1]["tokens"]
    assert steps[0]["lr"] == pytest.approx(1.5e-3) and steps[1]["lr"] > steps[-1]["lr"]
    assert result.finished and result.progress.tokens == seen and result.progress.step == len(steps)
    assert result.progress.seconds == pytest.approx(sum(step["seconds"] for step in steps))
    # checkpoint
    assert result.folder == out(recipe) / "checkpoints" / f"step_{len(steps):07d}"
    assert [(r["step"], r["path"]) for r in records(recipe, "checkpoint")] == [(len(steps), str(result.folder))]
    assert recipe_from_dict(read_progress(result.folder)[1]) == recipe
    trained = load(result.folder)
    assert trained.config.mask_token_id is not None and trained.config.vocab_size == 64
    # validation
    found = records(recipe, "validation")
    assert [record["step"] for record in found] == [*range(4, len(steps), 4), len(steps)]
    held_out = prepare(recipe, recipe.model.source).held_out
    assert len(held_out) == 3
    wanted = validate(trained.transformer, trained.transformer, held_out, 30, torch.float32)
    assert result.validation == wanted
    assert {key: found[-1][key] for key in dataclasses.asdict(wanted)} == dataclasses.asdict(wanted)


def test_it_learns(make_recipe: Make) -> None:
    train(make_recipe("optim.total_tokens=15000", "optim.batch_tokens=200", "optim.micro_tokens=200", "optim.lr=1e-2"))
    steps = records(make_recipe())
    first, last = steps[:5], steps[-10:]
    for part in ("ar", "mdm"):
        assert sum(s[part] for s in last) / 10 < 0.5 * sum(s[part] for s in first) / 5


def test_micro_batches_don_t_matter(make_recipe: Make, whole: tuple[Recipe, TrainResult]) -> None:
    recipe = make_recipe("optim.micro_tokens=60")
    train(recipe)
    assert [s[:2] for s in course(recipe)] == [s[:2] for s in course(whole[0])]
    assert [s[2:5] for s in course(recipe)] == [pytest.approx(s[2:5], rel=1e-3) for s in course(whole[0])]


@pytest.mark.parametrize("setting", ["run.precision=bfloat16", "model.dtype=bfloat16"])
def test_bfloat16_runs_are_close_and_resume(setting: str, make_recipe: Make, whole: Any, at_step: Any) -> None:
    recipe = make_recipe(setting)
    at_step(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted):
        train(recipe)
    result = train(recipe, resume=True)
    assert load(result.folder, dtype=torch.bfloat16).transformer.dtype == torch.bfloat16
    assert [s[2:4] for s in course(recipe)][:3] == [pytest.approx(s[2:4], rel=0.05) for s in course(whole[0])][:3]


def test_without_held_out_rows_nothing_is_validated(make_recipe: Make) -> None:
    for setting in ("data.held_out=0", "run.validation_rows=0"):
        recipe = make_recipe(setting, "run.validate_every=2", f"run.out={make_recipe().run.out}-{setting}")
        result = train(recipe)
        assert result.finished and result.validation is None and records(recipe, "validation") == []


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


# ---- stops and resumes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_a_resume_changes_nothing(
    number: signal.Signals, make_recipe: Make, whole: tuple[Recipe, TrainResult], at_step: Any
) -> None:
    recipe, before = make_recipe("run.validate_every=4"), signal.getsignal(number)
    at_step(4, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted, match=r"stopped at step 4, saved in .*step_0000004; go on with --resume"):
        train(recipe)
    assert signal.getsignal(number) == before
    assert [path.name for path in checkpoints(out(recipe) / "checkpoints")] == ["step_0000004"]
    assert records(recipe, "validation") == []  # a stop doesn't wait for one
    assert_as_whole(recipe, train(recipe, resume=True), whole)


def test_signals_in_a_row_and_several_stops(make_recipe: Make, whole: tuple[Recipe, TrainResult], at_step: Any) -> None:
    recipe = make_recipe()

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    for step in (1, 2):
        at_step(step, twice)  # each counts the steps from its own start
    with pytest.raises(Interrupted, match="step 1,"):
        train(recipe)
    with pytest.raises(Interrupted, match="step 2,"):
        train(recipe, resume=True)
    assert_as_whole(recipe, train(recipe, resume=True), whole)


def test_a_signal_during_a_checkpoint_lets_it_be_written(
    make_recipe: Make, whole: tuple[Recipe, TrainResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(EVERY_STEP)
    original, calls = state.save_file, []

    def save_file(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        original(*arguments)

    monkeypatch.setattr(state, "save_file", save_file)
    with pytest.raises(Interrupted, match="step 3,"):
        train(recipe)
    assert len(calls) == 3  # the stop has nothing more to save
    assert_as_whole(recipe, train(recipe, resume=True), whole)


def test_a_signal_in_the_last_step_doesn_t_undo_the_end(
    make_recipe: Make, whole: tuple[Recipe, TrainResult], at_step: Any
) -> None:
    recipe = make_recipe()
    at_step(whole[1].progress.step, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert_as_whole(recipe, train(recipe), whole)


def test_a_crash_between_checkpoints(make_recipe: Make, whole: tuple[Recipe, TrainResult], monkeypatch: Any) -> None:
    """Steps after the checkpoint are done again and stand once in the log; a line that was cut short is gone."""
    recipe = make_recipe("run.validate_every=5")
    original, calls = Trainer.step, []

    def step(trainer: Trainer) -> Any:
        calls.append(trainer)
        if len(calls) == 8:
            raise MemoryError
        result = original(trainer)
        if trainer.progress.step == 3:
            trainer.save()
        return dataclasses.replace(result, ar=-1.0) if trainer.progress.step > 3 and len(calls) < 8 else result

    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(MemoryError):
        train(recipe)
    assert [r["step"] for r in records(recipe)] == list(range(1, 8)) and len(records(recipe, "validation")) == 1
    with open(out(recipe) / "log.jsonl", "a") as file:
        file.write('{"kind": "step", "step": 3, "tok')
    assert_as_whole(recipe, train(recipe, resume=True), whole)
    last = whole[1].progress.step
    assert [r["step"] for r in records(recipe, "validation")] == [5, last]


def test_a_killed_process(make_recipe: Make, tmp_path: Path, whole: tuple[Recipe, TrainResult]) -> None:
    recipe = make_recipe(EVERY_STEP)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    code = (
        "import json, sys, time\n"
        "from refusion.training import loop\n"
        "from refusion.training.recipe import recipe_from_dict\n"
        "step = loop.Trainer.step\n"
        "loop.Trainer.step = lambda trainer: (time.sleep(0.05), step(trainer))[1]\n"
        "loop.train(recipe_from_dict(json.load(open(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "recipe.json")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while len(checkpoints(out(recipe) / "checkpoints")) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.kill()
        process.wait()
    assert 2 <= len(records(recipe)) < whole[1].progress.step
    assert_as_whole(recipe, train(recipe, resume=True), whole)
    hidden = [path.name for path in (out(recipe) / "checkpoints").iterdir() if path.name.startswith(".")]
    assert hidden == []


def test_a_resume_after_the_end_does_nothing(make_recipe: Make) -> None:
    recipe = make_recipe()
    first = train(recipe)
    before = (first.folder / "model.safetensors").stat().st_mtime_ns
    again = train(recipe, resume=True)
    assert again.finished and again.folder == first.folder and again.validation == first.validation
    assert (first.folder / "model.safetensors").stat().st_mtime_ns == before
    assert len(records(recipe)) == first.progress.step


def test_a_resume_without_a_run_starts_one(make_recipe: Make, whole: tuple[Recipe, TrainResult]) -> None:
    recipe = make_recipe()
    assert_as_whole(recipe, train(recipe, resume=True), whole)


def test_a_longer_budget_goes_on(make_recipe: Make) -> None:
    constant = "optim.schedule=constant"
    short = make_recipe(constant)
    train(short)
    longer = make_recipe(constant, "optim.total_tokens=1200")
    train(longer, resume=True)
    direct = make_recipe(constant, "optim.total_tokens=1200", f"run.out={short.run.out}-direct")
    result = train(direct)
    assert course(longer) == course(direct) and result.progress.tokens >= 1200


def test_checkpoints_on_the_way(make_recipe: Make) -> None:
    recipe = make_recipe(EVERY_STEP, "run.keep_checkpoints=3")
    last = train(recipe).progress.step
    wanted = [f"step_{step:07d}" for step in (last - 2, last - 1, last)]
    assert sorted(path.name for path in (out(recipe) / "checkpoints").iterdir()) == wanted
    assert [r["step"] for r in records(recipe, "checkpoint")] == list(range(1, last + 1))


def test_any_kept_checkpoint_goes_on_alike(make_recipe: Make, whole: tuple[Recipe, TrainResult]) -> None:
    """The newest one is damaged; told to delete it, the user goes on from the one before."""
    recipe = make_recipe(EVERY_STEP)
    newest = train(recipe).folder
    (newest / "training.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"delete {newest} to go on from an earlier checkpoint"):
        train(recipe, resume=True)
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    assert_as_whole(recipe, train(recipe, resume=True), whole)


def test_a_full_disk_stops_the_run_and_keeps_the_checkpoint(
    make_recipe: Make, whole: tuple[Recipe, TrainResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(EVERY_STEP)
    original, calls = state.save_file, []

    def save_file(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(*arguments)

    monkeypatch.setattr(state, "save_file", save_file)
    with pytest.raises(CheckpointError, match="step_0000003 can't be written .*No space left.*go on with --resume"):
        train(recipe)
    assert [path.name for path in checkpoints(out(recipe) / "checkpoints")] == ["step_0000001", "step_0000002"]
    assert_as_whole(recipe, train(recipe, resume=True), whole)


def test_it_runs_in_a_thread(make_recipe: Make, whole: tuple[Recipe, TrainResult]) -> None:
    recipe, results = make_recipe(), []
    worker = threading.Thread(target=lambda: results.append(train(recipe)))
    worker.start()
    worker.join()
    assert_as_whole(recipe, results[0], whole)


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


def test_a_gradient_that_isn_t_finite_stops_the_run(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert all(bool(value.isfinite().all()) for value in weights(found).values())
    assert read_progress(found)[0].step == len(records(recipe)) >= 2
    assert train(make_recipe(EVERY_STEP, "optim.lr=1e-3"), resume=True).finished


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
