"""Checkpoints of a run: exact round trips, all or nothing on the disk, errors in one sentence."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import refusion.checkpoint.saving
from refusion.checkpoint import Checkpoint, add_mask_token, load
from refusion.errors import CheckpointError
from refusion.training import state
from refusion.training.loop import make_optimizer
from refusion.training.plan import Place
from refusion.training.state import Progress, checkpoints, read_optimizer, read_progress, write_checkpoint

RECIPE = {"run": {"seed": 3}, "optim": {"lr": 1e-3, "betas": [0.9, 0.95]}}
Run = tuple[Checkpoint, torch.optim.Optimizer]


@pytest.fixture
def start(model_folder: Path, make_recipe: Callable[..., Any]) -> Callable[..., Run]:
    """start(source): a checkpoint and its optimiser."""

    def make(source: Path = model_folder) -> Run:
        checkpoint = add_mask_token(load(source))
        return checkpoint, make_optimizer(checkpoint, make_recipe())

    return make


def learn(run: Run, steps: int = 1) -> None:
    checkpoint, optimizer = run
    for step in range(steps):
        tokens = torch.arange(8)[None] + step
        checkpoint.transformer.project(checkpoint.transformer(tokens, tokens)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def write(run: Run, folder: Path, step: int, keep: int = 2, seed: int = 3) -> Path:
    progress = Progress(step, 100 * step, 1.5 * step, Place(step // 3, step % 3))
    return write_checkpoint(folder, *run, progress, {**RECIPE, "run": {"seed": seed}}, keep)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in run[0].transformer.named_parameters()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start()
    learn(run, 3)
    path = write(run, tmp_path, 7)
    assert path == tmp_path / "step_0000007" and names(tmp_path) == [path.name]
    progress, recipe = read_progress(path)
    assert progress == Progress(7, 700, 10.5, Place(2, 1)) and recipe == RECIPE
    again = start(path)
    read_optimizer(path, again[0], again[1])
    assert same(weights(again), weights(run))
    assert again[0].config == run[0].config
    # and both go on alike
    learn(run, 2)
    learn(again, 2)
    assert same(weights(again), weights(run))


def test_before_the_first_step(start: Callable[..., Run], tmp_path: Path) -> None:
    run, path = start(), tmp_path / "step_0000000"
    assert write(run, tmp_path, 0) == path
    again = start(path)
    read_optimizer(path, again[0], again[1])
    learn(run, 2)
    learn(again, 2)
    assert same(weights(again), weights(run))


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_are_kept(keep: int, start: Callable[..., Run], tmp_path: Path) -> None:
    run = start()
    for step in (1, 2, 30, 4000):
        write(run, tmp_path, step, keep)
    wanted = [tmp_path / f"step_{step:07d}" for step in (1, 2, 30, 4000)][-keep:]
    assert checkpoints(tmp_path) == wanted and names(tmp_path) == [path.name for path in wanted]


def test_the_same_state_is_not_written_again(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start()
    path = write(run, tmp_path, 1)
    before = (path / "model.safetensors").stat().st_ino
    assert write(run, tmp_path, 1) == path and (path / "model.safetensors").stat().st_ino == before
    assert write(run, tmp_path, 1, seed=4) == path  # another recipe is another state
    assert read_progress(path)[1]["run"] == {"seed": 4} and names(tmp_path) == [path.name]


# ---- failures


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("place", ["weights", "optimizer", "state", "flush", "rename"])
def test_a_full_disk_leaves_the_earlier_checkpoint(
    place: str, start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    first = write(run, tmp_path, 1)
    wanted = weights(run)
    learn(run)
    with monkeypatch.context() as patch:
        if place == "weights":
            patch.setattr(refusion.checkpoint.saving, "save_file", full_disk)
        elif place == "optimizer":
            patch.setattr(state, "save_file", full_disk)
        elif place == "state":
            original = Path.write_text
            patch.setattr(Path, "write_text", lambda path, *a, **k: full_disk() if path.name == state.STATE_FILE
                          else original(path, *a, **k))
        elif place == "flush":
            patch.setattr(os, "fsync", full_disk)
        else:
            patch.setattr(os, "replace", full_disk)
        with pytest.raises(CheckpointError) as caught:
            write(run, tmp_path, 2)
    message = str(caught.value)
    assert "step_0000002 can't be written" in message and "No space left on device" in message
    assert "earlier ones are kept" in message and "\n" not in message and message.count("can't be written") == 1
    assert checkpoints(tmp_path) == [first] and names(tmp_path) == [first.name]
    assert same(weights(start(first)), wanted)
    assert write(run, tmp_path, 2) in checkpoints(tmp_path)  # with room again it works


@pytest.mark.parametrize("operation", range(1, 8))
def test_a_killed_rewriting_never_loses_the_step(
    operation: int, start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill at any change of folders, half-way through a deletion too, leaves a whole checkpoint."""
    run = start()
    write(run, tmp_path, 1, keep=1)
    wanted, calls = weights(run), []
    rename, delete = os.replace, shutil.rmtree

    def killed_rename(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == operation:
            raise KeyboardInterrupt
        rename(*arguments)

    def killed_delete(path: Path, **options: Any) -> None:
        calls.append((path,))
        if len(calls) == operation:
            (Path(path) / "model.safetensors").unlink(missing_ok=True)
            raise KeyboardInterrupt
        delete(path, **options)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(os, "replace", killed_rename)
        patch.setattr(shutil, "rmtree", killed_delete)
        write(run, tmp_path, 1, keep=1, seed=4)
    found = checkpoints(tmp_path)
    assert found and all(same(weights(start(path)), wanted) for path in found)
    assert read_progress(found[-1])[0].step == 1
    # the next one cleans up
    assert write(run, tmp_path, 2, keep=1) == tmp_path / "step_0000002" and names(tmp_path) == ["step_0000002"]


def test_what_a_killed_process_left_is_removed(start: Callable[..., Run], tmp_path: Path) -> None:
    for name in (".partial-step_0000001", "..partial-step_0000002.x1y2.partial", ".step_0000000.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    assert checkpoints(tmp_path) == []
    write(start(), tmp_path, 3)
    assert names(tmp_path) == ["notes", "step_0000003"]


def test_a_folder_without_state_is_no_checkpoint(start: Callable[..., Run], tmp_path: Path) -> None:
    path = write(start(), tmp_path, 1)
    (tmp_path / "step_0000002").mkdir()
    assert checkpoints(tmp_path) == [path] and checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", '"x"', "{}", '{"progress": {}}', '{"progress": 3, "recipe": {}}',
    '{"progress": {"step": 1, "tokens": 2, "seconds": 3, "place": null}, "recipe": {}}',
    '{"progress": {"step": 1, "tokens": 2, "seconds": 3, "place": {"epoch": 0, "index": 0}}}',
    '{"progress": {"step": 1, "tokens": 2, "seconds": 3, "place": {"epoch": 0, "index": 0}}, "recipe": []}',
    '{"progress": {"step": 1, "tokens": 2, "seconds": 3, "place": {"epoch": 0, "index": 0}}, "recipe": {"run": 1}}',
    '{"progress": {"step": "1", "tokens": 2, "seconds": 3, "place": {"epoch": 0, "index": 0}}, "recipe": {}}',
    '{"progress": {"step": 1, "tokens": 2, "seconds": 3, "place": {"epoch": 0, "row": 0}}, "recipe": {}}',
    '{"progress": {"step": 1, "tokens": 2, "seconds": 3, "place": {"epoch": -1, "index": 0}}, "recipe": {}}',
    '{"progress": {"steps": 1}, "recipe": {}}', "[" * 100_000, "\ud800",
])
def test_a_damaged_state_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / state.STATE_FILE).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=r"training.json can't be read \(.*\); delete .* to go on from an earl"):
        read_progress(tmp_path)


def test_a_missing_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"training.json can't be read"):
        read_progress(tmp_path)


def test_a_damaged_optimizer_file_is_named(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start()
    learn(run)
    path = write(run, tmp_path, 1)
    file = path / state.OPTIMIZER_FILE
    whole = file.read_bytes()
    tensors = {key: value.clone() for key, value in load_file(file).items()}  # not maps of the file
    name = "layers.0.attention.qkv.weight"

    def refused(words: str) -> None:
        with pytest.raises(CheckpointError, match=words) as caught:
            read_optimizer(path, *run)
        assert f"delete {path} to go on from an earlier checkpoint" in str(caught.value)

    file.write_bytes(whole[: len(whole) // 2])
    refused("optimizer.safetensors can't be read")
    file.write_bytes(b"")
    refused("optimizer.safetensors can't be read")
    save_file({key: value for key, value in tensors.items() if key != f"{name}.exp_avg_sq"}, file)
    refused(f"lacks .*{name}")
    for key in ("exp_avg", "exp_avg_sq"):
        save_file({**tensors, f"{name}.{key}": torch.zeros(3)}, file)
        refused(f"holds {name} in another shape")
    file.unlink()
    refused("optimizer.safetensors can't be read")


def test_what_is_written_can_be_read_without_this_code(start: Callable[..., Run], tmp_path: Path) -> None:
    """The format that running trainings are resumed from: names and shapes must stay."""
    run = start()
    learn(run, 2)
    path = write(run, tmp_path, 2)
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "optimizer.safetensors", "training.json"}
    assert wanted <= set(names(path))
    tensors = load_file(path / "optimizer.safetensors")
    for name, value in run[0].transformer.named_parameters():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(tensors[f"{name}.{key}"], run[1].state[value][key])
    assert json.loads((path / "training.json").read_text()) == {
        "progress": {"step": 2, "tokens": 200, "seconds": 3.0, "place": {"epoch": 0, "index": 2}}, "recipe": RECIPE,
    }
