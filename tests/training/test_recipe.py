"""Recipes: strict reading, overrides, environment, paths, and the round trip."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from refusion.errors import ConfigError
from refusion.training.recipe import Recipe, apply_overrides, expand, load_recipe, parse_yaml, recipe_from_dict

SMALL = {"data": {"sources": [{"kind": "gym", "name": "chain_sum", "size": 3}]}, "run": {"out": "o"}}
RECIPES = Path(__file__).parents[2] / "recipes"


def with_setting(place: str, value: Any) -> dict[str, Any]:
    return apply_overrides(SMALL, [f"{place}={json.dumps(value)}"])


def write(folder: Path, text: str) -> Path:
    path = folder / "r.yaml"
    path.write_text(text)
    return path


def test_defaults_and_round_trip() -> None:
    recipe = recipe_from_dict(SMALL)
    assert recipe.noise.slot_sizes == (4, 8, 16, 32) and recipe.noise.min_ratio == 1e-3
    assert recipe.data.held_out == 200 and recipe.data.max_length == 1024
    assert recipe.optim.micro_tokens == recipe.optim.batch_tokens == 4096
    assert recipe.run.keep_checkpoints == 2 and recipe.run.checkpoint_every_minutes == 10
    plain = recipe.to_dict()
    assert recipe_from_dict(json.loads(json.dumps(plain))) == recipe
    assert recipe_from_dict(parse_yaml(yaml.safe_dump(plain))) == recipe
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.run.out = "x"  # type: ignore[misc]


@given(
    st.floats(1e-9, 10),
    st.lists(st.integers(1, 64), min_size=1, max_size=5),
    st.one_of(st.integers(0, 999), st.floats(0, 0.99)),
    st.booleans(),
    st.none() | st.integers(1, 8),
)
def test_values_survive_the_round_trip(lr: float, sizes: list[int], held: Any, flag: bool, threads: int | None) -> None:
    data = {
        "data": {**SMALL["data"], "held_out": held},
        "run": {"out": "o", "threads": threads, "compile": flag},
        "noise": {"slot_sizes": sizes},
        "optim": {"lr": lr},
    }
    recipe = recipe_from_dict(data)
    assert recipe.optim.lr == lr and recipe.noise.slot_sizes == tuple(sizes)
    assert recipe.data.held_out == held and type(recipe.data.held_out) is type(held)
    assert recipe_from_dict(parse_yaml(yaml.safe_dump(recipe.to_dict()))) == recipe


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_recipes_of_this_project_are_readable(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gsm8k_train.jsonl").write_text("")
    monkeypatch.setenv("REFUSION_DATA", str(tmp_path))
    raw = parse_yaml(path.read_text())
    if "data" in raw and "run" in raw:
        assert isinstance(load_recipe(path), Recipe)


WRONG = [
    ("optim.warmup", 1, "optim.warmup is unknown; did you mean 'warmup_steps'"),
    ("optm", {}, "optm is unknown; did you mean 'optim'"),
    ("zzz", {}, "zzz is unknown; known are data, run, model, noise, loss, lora, optim"),
    ("data.sources.0.wieght", 1, "data.sources.0.wieght is unknown; did you mean 'weight'"),
    ("optim", [1], "optim should be a section of keys and values, not a list"),
    ("data.sources", 3, "data.sources should be a list, not the number 3"),
    ("data.sources", {"kind": "gym"}, "data.sources should be a list, not a section"),
    ("data.sources.0", "x", "data.sources.0 should be a section of keys and values, not the text 'x'"),
    ("data.sources.0.options", [1], "data.sources.0.options should be a section of keys and values, not a list"),
    ("data.sources.0.kind", "hub", "data.sources.0.kind is 'hub', it should be file or gym"),
    ("data.sources", [{}], "data.sources.0.kind is missing"),
    ("data.sources", [], "data.sources is empty"),
    ("data.held_out", "some", "data.held_out should be a number, not the text 'some'"),
    ("data.held_out", True, "data.held_out should be a number, not true"),
    ("data.system", 3, "data.system should be text, not the number 3"),
    ("run.out", None, "run.out should be text, not nothing"),
    ("run.out", "", "run.out is empty"),
    ("run.threads", 0, "run.threads is 0, it should be 1 or more"),
    ("run.threads", 1.5, "run.threads should be a whole number, not the number 1.5"),
    ("run.compile", 1, "run.compile should be true or false, not the number 1"),
    ("run.seed", True, "run.seed should be a whole number, not true"),
    ("run.seed", -1, "run.seed is -1, it should be 0 or more"),
    ("run.precision", "fp8", "run.precision is 'fp8', it should be float32 or bfloat16"),
    ("run.log_every", 0, "run.log_every is 0, it should be 1 or more"),
    ("run.checkpoint_every_minutes", 0, "run.checkpoint_every_minutes is 0.0, it should be above 0"),
    ("model.source", "", "model.source is empty"),
    ("model.adapter", "", "model.adapter is empty"),
    ("model.dtype", "int8", "model.dtype is 'int8'"),
    ("noise.slot_sizes", [], "noise.slot_sizes is empty"),
    ("noise.slot_sizes", [4, 0], "noise.slot_sizes holds 0, every size should be 1 or more"),
    ("noise.slot_sizes", [4, "x"], "noise.slot_sizes.1 should be a whole number, not the text 'x'"),
    ("noise.slot_weights", [1], "noise.slot_weights has 1 entries, slot_sizes has 4"),
    ("noise.slot_weights", [0, 0, 0, 0], "noise.slot_weights should be 0 or more, and one of them above 0"),
    ("noise.slot_weights", [1, 1, 1, -1], "noise.slot_weights should be 0 or more"),
    ("noise.min_ratio", 0, "noise.min_ratio is 0.0, it should be above 0 and at most 1"),
    ("noise.mask_ratio", "beta", "noise.mask_ratio is 'beta', it should be uniform or stratified"),
    ("noise.past_end_slots", -1, "noise.past_end_slots is -1, it should be 0 or more"),
    ("noise.past_end_weight", -1, "noise.past_end_weight is -1.0, it should be 0 or more"),
    ("loss.mdm_weight", -0.5, "loss.mdm_weight is -0.5, it should be 0 or more"),
    ("loss.mdm_normalizer", "sum", "loss.mdm_normalizer is 'sum', it should be ratio or mean"),
    ("optim.lr", 0, "optim.lr is 0.0, it should be above 0"),
    ("optim.lr", "fast", "optim.lr should be a number, not the text 'fast'"),
    ("optim.lr", float("nan"), "optim.lr is nan, it should be finite"),
    ("optim.schedule", "linear", "optim.schedule is 'linear', it should be cosine or constant or trapezoid"),
    ("optim.decay_fraction", 1.5, "optim.decay_fraction is 1.5, it should be at most 1"),
    ("optim.betas", [0.9], "optim.betas should be a list of 2, not of 1"),
    ("optim.betas", [0.9, 1], "optim.betas holds 1.0, it should be at least 0 and below 1"),
    ("optim.warmup_steps", -1, "optim.warmup_steps is -1, it should be 0 or more"),
    ("optim.total_tokens", 0, "optim.total_tokens is 0, it should be 1 or more"),
    ("optim.micro_tokens", 5000, "optim.micro_tokens is 5000, more than batch_tokens, 4096"),
]


@pytest.mark.parametrize("place, value, sentence", WRONG, ids=lambda value: str(value)[:30])
def test_wrong_settings_name_their_place(place: str, value: Any, sentence: str) -> None:
    data = with_setting(place, None)
    target: Any = data
    *steps, last = [int(step) if step.isdecimal() else step for step in place.split(".")]
    for step in steps:
        target = target[step]
    target[last] = value
    with pytest.raises(ConfigError) as caught:
        recipe_from_dict(data)
    assert str(caught.value).startswith(sentence)


def test_required_settings() -> None:
    with pytest.raises(ConfigError, match="^data is missing$"):
        recipe_from_dict({"run": {"out": "o"}})
    with pytest.raises(ConfigError, match="^run.out is missing$"):
        recipe_from_dict({**SMALL, "run": None})


def test_numbers_in_any_spelling() -> None:
    data = parse_yaml("{lr: 5e-4, total_tokens: 4_000_000, batch_tokens: 4.096e3, clip_norm: 1}")
    optim = recipe_from_dict({**SMALL, "optim": data}).optim
    assert (optim.lr, optim.total_tokens, optim.batch_tokens, optim.clip_norm) == (5e-4, 4_000_000, 4096, 1.0)
    assert type(optim.batch_tokens) is int and type(optim.clip_norm) is float
    texts = {"lr": "5e-4", "total_tokens": "70"}
    assert recipe_from_dict({**SMALL, "optim": texts, "run": {"out": "o", "compile": "True"}}).run.compile is True


def test_overrides() -> None:
    done = apply_overrides(SMALL, ["optim.lr=1e-3", "data.sources.0.weight=2", "run.out=a=b", "data.system="])
    assert done["optim"] == {"lr": 1e-3}
    assert done["data"]["sources"][0]["weight"] == 2
    assert done["run"]["out"] == "a=b" and done["data"]["system"] is None
    assert apply_overrides(SMALL, ["noise.slot_sizes=[4, 8]"])["noise"]["slot_sizes"] == [4, 8]
    assert apply_overrides({"optim": None}, ["optim.lr=1", "optim.lr=2"]) == {"optim": {"lr": 2}}
    assert "optim" not in SMALL and "weight" not in SMALL["data"]["sources"][0]


@pytest.mark.parametrize(
    "override, sentence",
    [
        ("optim.lr", "the override 'optim.lr' should look like section.key=value"),
        ("=3", "the override '=3' should look like"),
        ("optim..lr=3", "the override 'optim..lr=3' should look like"),
        ("optim.lr=[", "the override 'optim.lr=[' has a broken value: "),
        ("data.sources.1.weight=2", "the override 'data.sources.1.weight=2' names entry '1' of a list that has 1"),
        ("data.sources.x=2", "the override 'data.sources.x=2' names entry 'x' of a list that has 1"),
        ("run.out.x=2", "the override 'run.out.x=2' goes through the text 'o', where 'x' can't be"),
    ],
)
def test_wrong_overrides(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(SMALL, [override])
    assert str(caught.value).startswith(sentence)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", "/f")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("NOWHERE", raising=False)
    data = {"a": ["${FOLDER}/x", "${NOWHERE:-y}${FOLDER}", "${EMPTY:-z}", "[${EMPTY}]", "${NOWHERE:-}", 3]}
    assert expand(data) == {"a": ["/f/x", "y/f", "z", "[]", "", 3]}
    with pytest.raises(ConfigError, match=r"variable NOWHERE is not set; set it or write \$\{NOWHERE:-default\}"):
        expand("${NOWHERE}")


def test_files_are_found_from_here_then_from_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (there / "a.jsonl").touch()
    path = write(there, "data: {sources: [{kind: file, path: '${NAME:-a}.jsonl'}]}\nrun: {out: o}\n")
    monkeypatch.chdir(here)
    assert load_recipe(path).data.sources[0].path == str(there / "a.jsonl")
    (here / "a.jsonl").touch()
    assert load_recipe(path).data.sources[0].path == "a.jsonl"
    with pytest.raises(ConfigError, match=r"data.sources.0.path names b.jsonl, which is not a file from here"):
        load_recipe(path, ["data.sources.0.path=b.jsonl"])
    with pytest.raises(ConfigError, match=r"names /nowhere/b.jsonl, which is not a file$"):
        load_recipe(path, ["data.sources.0.path=/nowhere/b.jsonl"])


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("", "should hold sections of keys and values, not nothing"),
        ("- 1", "should hold sections of keys and values, not a list"),
        ("run: [", "is broken YAML: line "),
        ("run: {out: a, out: b}", "is broken YAML: line 1: 'out' twice"),
        ("[a]: 1", "is broken YAML: line 1: found unhashable key"),
        ("run: {out: o}\nlos: {}", ": los is unknown; did you mean 'loss'"),
    ],
)
def test_broken_recipes(tmp_path: Path, text: str, sentence: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value) and sentence in str(caught.value)


def test_unreadable_recipes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.yaml is missing; check the path"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        load_recipe(tmp_path)
    (tmp_path / "r.yaml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not valid UTF-8"):
        load_recipe(tmp_path / "r.yaml")
