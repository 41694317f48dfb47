"""Stops of every kind, and resumes that change nothing: the losses, the log and the weights of the undisturbed run."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from refusion.errors import CheckpointError
from refusion.training import state
from refusion.training.loop import Interrupted, Trainer, TrainResult, train
from refusion.training.recipe import Recipe
from refusion.training.state import checkpoints

Make = Callable[..., Recipe]
Whole = tuple[Recipe, TrainResult]
EVERY_STEP = "run.checkpoint_every_minutes=1e-9"
ROOT = Path(__file__).parents[2]


def out(recipe: Recipe) -> Path:
    return Path(recipe.run.out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_a_resume_changes_nothing(
    number: signal.Signals, make_recipe: Make, at_step: Any, look: Any
) -> None:
    recipe, before = make_recipe("run.validate_every=4"), signal.getsignal(number)
    at_step(4, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted, match=r"stopped at step 4, saved in .*step_0000004; go on with --resume"):
        train(recipe)
    assert signal.getsignal(number) == before
    assert [path.name for path in checkpoints(out(recipe) / "checkpoints")] == ["step_0000004"]
    assert look.records(recipe, "validation") == []  # a stop doesn't wait for one
    look.assert_as_whole(recipe, train(recipe, resume=True))


def test_signals_in_a_row_and_several_stops(make_recipe: Make, at_step: Any, look: Any) -> None:
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
    look.assert_as_whole(recipe, train(recipe, resume=True))


def test_a_signal_during_a_checkpoint_lets_it_be_written(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch, look: Any
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
    look.assert_as_whole(recipe, train(recipe, resume=True))


def test_a_signal_in_the_last_step_doesn_t_undo_the_end(
    make_recipe: Make, whole: Whole, at_step: Any, look: Any
) -> None:
    recipe = make_recipe()
    at_step(whole[1].progress.step, lambda: os.kill(os.getpid(), signal.SIGINT))
    look.assert_as_whole(recipe, train(recipe))


def test_a_crash_between_checkpoints(make_recipe: Make, whole: Whole, monkeypatch: Any, look: Any) -> None:
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
    assert [r["step"] for r in look.records(recipe)] == list(range(1, 8))
    assert [r["step"] for r in look.records(recipe, "validation")] == [5]
    with open(out(recipe) / "log.jsonl", "a") as file:
        file.write('{"kind": "step", "step": 3, "tok')
    look.assert_as_whole(recipe, train(recipe, resume=True))
    last = whole[1].progress.step
    assert [r["step"] for r in look.records(recipe, "validation")] == [5, last]


def test_a_killed_process(make_recipe: Make, tmp_path: Path, look: Any) -> None:
    """It dies while it writes the fourth checkpoint; the fourth step is in the log by then."""
    recipe = make_recipe(EVERY_STEP)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    code = (
        "import json, os, signal, sys\n"
        "from refusion.training import loop, state\n"
        "from refusion.training.recipe import recipe_from_dict\n"
        "def save_file(*arguments, save_file=state.save_file, calls=[]):\n"
        "    save_file(*arguments)\n"
        "    calls.append(arguments)\n"
        "    if len(calls) == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
        "state.save_file = save_file\n"
        "loop.train(recipe_from_dict(json.load(open(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "recipe.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = out(recipe) / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [".partial-step_0000004", "step_0000002", "step_0000003"]
    assert len(look.records(recipe)) == 4
    look.assert_as_whole(recipe, train(recipe, resume=True))
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_resume_after_the_end_does_nothing(make_recipe: Make, look: Any) -> None:
    recipe = make_recipe()
    first = train(recipe)
    before = (first.folder / "model.safetensors").stat().st_mtime_ns
    again = train(recipe, resume=True)
    assert again.model.is_dir() and again.folder == first.folder and again.validation == first.validation
    assert (first.folder / "model.safetensors").stat().st_mtime_ns == before
    assert len(look.records(recipe)) == first.progress.step


def test_a_resume_without_a_run_starts_one(make_recipe: Make, look: Any) -> None:
    recipe = make_recipe()
    look.assert_as_whole(recipe, train(recipe, resume=True))


def test_a_longer_budget_goes_on(make_recipe: Make, look: Any) -> None:
    constant = "optim.schedule=constant"
    short = make_recipe(constant)
    train(short)
    longer = make_recipe(constant, "optim.total_tokens=1200")
    train(longer, resume=True)
    direct = make_recipe(constant, "optim.total_tokens=1200", f"run.out={short.run.out}-direct")
    result = train(direct)
    assert look.course(longer) == look.course(direct) and result.progress.tokens >= 1200


def test_checkpoints_on_the_way(make_recipe: Make, look: Any) -> None:
    recipe = make_recipe(EVERY_STEP, "run.keep_checkpoints=3")
    last = train(recipe).progress.step
    wanted = [f"step_{step:07d}" for step in (last - 2, last - 1, last)]
    assert sorted(path.name for path in (out(recipe) / "checkpoints").iterdir()) == wanted
    assert [r["step"] for r in look.records(recipe, "checkpoint")] == list(range(1, last + 1))


def test_any_kept_checkpoint_goes_on_alike(make_recipe: Make, look: Any) -> None:
    """The newest one is damaged; told to delete it, the user goes on from the one before."""
    recipe = make_recipe(EVERY_STEP)
    newest = train(recipe).folder
    (newest / "training.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"delete {newest} to go on from an earlier checkpoint"):
        train(recipe, resume=True)
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    look.assert_as_whole(recipe, train(recipe, resume=True))


def test_a_full_disk_stops_the_run_and_keeps_the_checkpoint(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch, look: Any
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
    look.assert_as_whole(recipe, train(recipe, resume=True))


def test_it_runs_in_a_thread(make_recipe: Make, look: Any) -> None:
    recipe, results = make_recipe(), []
    worker = threading.Thread(target=lambda: results.append(train(recipe)))
    worker.start()
    worker.join()
    look.assert_as_whole(recipe, results[0])
