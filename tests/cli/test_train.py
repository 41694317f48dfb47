"""`refusion train`: the recipe with its overrides reaches the loop; interrupts and errors have their codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from refusion.errors import RefusionError
from refusion.training import loop
from refusion.training.loop import Interrupted, TrainResult
from refusion.training.recipe import Recipe
from refusion.training.state import Progress

RECIPE = """
data: {sources: [{kind: gym, name: chain_sum, size: 3}]}
run: {out: runs/x}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Recipe, bool]]:
    """Recipe and resume of every training that was started."""
    seen: list[tuple[Recipe, bool]] = []

    def train(recipe: Recipe, *, resume: bool = False, **_: Any) -> TrainResult:
        seen.append((recipe, resume))
        return TrainResult(Path("runs/x/checkpoints/step_3"), Path("runs/x/model"), Progress(step=3, tokens=4500), None)

    monkeypatch.setattr(loop, "train", train)
    return seen


def test_a_recipe_is_run(call, recipe, runs):
    result = call("train", recipe)
    assert result.exit_code == 0, result.output
    assert result.stdout == "trained 3 steps, 4,500 tokens; the model is runs/x/model\n"
    [(settings, resume)] = runs
    assert settings.run.out == "runs/x" and resume is False


def test_overrides_and_resume(call, recipe, runs):
    result = call("train", recipe, "--set", "optim.lr=2e-4", "--set", "noise.slot_sizes=[4, 8]", "--resume")
    assert result.exit_code == 0, result.output
    [(settings, resume)] = runs
    assert settings.optim.lr == 2e-4 and settings.noise.slot_sizes == (4, 8) and resume is True


def test_a_bad_setting_is_a_usage_error(call, recipe, runs, failing):
    assert "optim" in failing(call("train", recipe, "--set", "optim.rate=1"), 2)
    assert "section.key=value" in failing(call("train", recipe, "--set", "optim.lr"), 2)
    assert "is missing" in failing(call("train", recipe.with_name("none.yaml")), 2)
    assert "RECIPE" in failing(call("train"), 2)
    assert not runs


def test_an_interrupted_run_says_how_to_go_on(call, recipe, monkeypatch):
    def train(*_: Any, **__: Any) -> TrainResult:
        raise Interrupted("stopped at step 3, saved in runs/x; go on with --resume")

    monkeypatch.setattr(loop, "train", train)
    result = call("train", recipe)
    assert result.exit_code == 130
    assert result.stderr == "stopped at step 3, saved in runs/x; go on with --resume\n"


def test_a_failed_run_is_one_line(call, recipe, monkeypatch, failing):
    def train(*_: Any, **__: Any) -> TrainResult:
        raise RefusionError("the gradient of step 3 is not finite")

    monkeypatch.setattr(loop, "train", train)
    assert failing(call("train", recipe), 1) == "the gradient of step 3 is not finite"
