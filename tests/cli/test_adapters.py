"""`refusion extract`, `merge`, `info` and `--adapter` on a tiny model with random weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from refusion import checkpoint
from refusion.checkpoint import Checkpoint, loading
from refusion.errors import CheckpointError
from refusion.model.config import ModelConfig
from refusion.model.transformer import Transformer
from refusion.training import prepare
from refusion.training.recipe import recipe_from_dict
from tests.conftest import tiny_tokenizer

RANK = 4


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A Llama of 2 layers without a mask token."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    transformer = Transformer(ModelConfig(
        vocab_size=320, num_tokens=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=8, max_positions=256, tie_embeddings=True, eos_token_ids=(0,),
    ))
    for parameter in transformer.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1)
    return checkpoint.save(Checkpoint(transformer, tokenizer, "made here"), tmp_path / "base")


@pytest.fixture
def tuned(base: Path, tmp_path: Path) -> Path:
    """The same with a mask token and every weight changed."""
    found = checkpoint.add_mask_token(checkpoint.load(base))
    torch.manual_seed(1)
    for parameter in found.transformer.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return checkpoint.save(found, tmp_path / "tuned")


@pytest.fixture
def adapter(call, base: Path, tuned: Path, tmp_path: Path) -> Path:
    result = call("extract", "--model", tuned, "--base", base, "--rank", RANK, "-o", tmp_path / "adapter")
    assert result.exit_code == 0, result.output
    assert Path(result.stdout.splitlines()[-1]) == tmp_path / "adapter"
    return tmp_path / "adapter"


def test_extract_says_what_is_lost_and_how_large_it_is(call, base, tuned, tmp_path):
    result = call("extract", "--model", tuned, "--base", base, "--rank", RANK, "-o", tmp_path / "a")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["module", "rank", "lost"]
    rows = {line[0]: line[1:] for line in lines[1:-2]}
    assert list(rows)[-1] == "mean" and rows["q_proj"][0] == str(RANK) and rows["embed_tokens"][0] == "-"
    assert 0 < float(rows["mean"][1].rstrip("%")) < 100 < 1 + float(rows["embed_tokens"][1].rstrip("%"))
    assert lines[-2][1] == "MB"


def test_extract_weighs_by_rows(call, base, tuned, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(
        json.dumps({"question": f"{n} + {n}?", "answer": f"the <<{n}+{n}=1>>dog jumps {n}"}) + "\n" for n in range(6)))
    given = ("extract", "--model", tuned, "--base", base, "--rank", RANK, "-o", tmp_path / "a")
    result = call(*given, "--calibration", rows, "--calibration-rows", 4, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "lost at the inputs" in result.stdout.splitlines()[0]
    mean = next(line.split() for line in result.stdout.splitlines() if line.startswith("mean"))
    assert float(mean[3].rstrip("%")) < float(mean[2].rstrip("%"))
    facts = checkpoint.info(tmp_path / "a")
    assert set(facts["dtypes"]) == {"F32"} and facts["mask_token"] == {"id": 294, "token": "<|mask|>"}
    # the rows count: other rows, other factors
    weight = checkpoint.load(base, adapter=tmp_path / "a").transformer.layers[0].mlp.down.weight  # type: ignore
    assert call(*given, "--calibration", rows, "--calibration-rows", 1, "--dtype", "float32").exit_code == 0
    other = checkpoint.load(base, adapter=tmp_path / "a").transformer.layers[0].mlp.down.weight  # type: ignore
    assert not torch.equal(weight, other)


def test_merge_writes_what_load_gives(call, base, adapter, tmp_path):
    result = call("merge", "--model", base, "--adapter", adapter, tmp_path / "merged", "--dtype", "float32")
    assert result.exit_code == 0 and Path(result.stdout.strip()) == tmp_path / "merged"
    wanted, found = checkpoint.load(base, adapter=adapter), checkpoint.load(tmp_path / "merged")
    assert found.config == wanted.config and found.config.mask_token_id == 294
    for (name, one), other in zip(
        wanted.transformer.named_parameters(), found.transformer.parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    assert call("convert", base, tmp_path / "half", "--adapter", adapter).exit_code == 0
    assert checkpoint.info(tmp_path / "half")["mask_token"]["id"] == 294


def test_several_files_come_back(call, base, tuned, adapter, tmp_path):
    result = call("extract", "--model", tuned, "--base", base, "--rank", RANK, "-o", tmp_path / "many",
                  "--max-shard-bytes", 5000)
    assert result.exit_code == 0 and not (tmp_path / "many" / "adapter_model.safetensors").exists()
    assert max(file.stat().st_size for file in (tmp_path / "many").glob("*.safetensors")) < 8000
    one, many = (checkpoint.load(base, adapter=folder).transformer for folder in (adapter, tmp_path / "many"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), many.parameters(), strict=True))


def test_info_about_an_adapter(call, base, adapter):
    lines = dict(line.split(None, 1) for line in call("info", adapter).stdout.splitlines())
    assert lines["format"] == "LoRA adapter (peft)" and lines["base"] == "base" and lines["path"] == str(adapter)
    assert lines["rank"] == f"{RANK}, alpha {RANK}" and "<|mask|> (294)" in lines["mask"]
    facts = json.loads(call("info", adapter, "--json").stdout)
    tensors = checkpoint.adapter.read_adapter(adapter).changes
    assert facts["parameters"] == sum(t.numel() for parts in tensors.values() for t in parts.values())
    with_it = call("info", base, "--adapter", adapter).stdout
    assert f"{adapter} (rank {RANK}, " in with_it and "<|mask|> (294)" in with_it
    assert "not yet a ReFusion model" in call("info", base).stdout


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_commands_hand_the_adapter_on(command, call, api, adapter, monkeypatch, tmp_path):
    if command == "bench":
        monkeypatch.setattr("refusion.cli.bench._run", lambda *_: ({"rows": []}, []))
        monkeypatch.setattr("refusion.cli.table.show", lambda rows: None)
    words = ["hello"] if command == "generate" else ["--prompts", tmp_path / "p.txt"]
    (tmp_path / "p.txt").write_text("hello\n")
    result = call(command, "--adapter", adapter, *words)
    assert result.exit_code == 0, (result.output, result.exception)
    assert call(command, *words).exit_code == 0
    assert [given["adapter"] for given in api.loads] == [str(adapter), None]


def test_generate_decodes_in_parallel_with_the_adapter_only(call, base, adapter):
    given = ("generate", "--model", base, "--json", "--max-tokens", 8, "--dtype", "float32", "the quick")
    plain = call(*given)
    assert plain.exit_code == 0 and "decoding left to right" in plain.stderr
    added = call(*given, "--adapter", adapter)
    assert added.exit_code == 0 and added.stderr == ""
    assert 0 < json.loads(added.stdout)["tokens"] <= 8


def test_the_default_base_of_extract_leaves_its_adapter_off(call, base, tuned, adapter, monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "default_model", lambda: base)
    monkeypatch.setattr("refusion.checkpoint.default.ADAPTER", adapter)
    assert checkpoint.info("default")["adapter"]["rank"] == RANK
    result = call("extract", "--model", tuned, "--rank", RANK, "-o", tmp_path / "again")
    assert result.exit_code == 0, result.output
    one, again = (checkpoint.load(base, adapter=folder).transformer for folder in (adapter, tmp_path / "again"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert call("convert", "--adapter", "none", "default", tmp_path / "plain").exit_code == 0
    assert checkpoint.info(tmp_path / "plain")["mask_token"] is None


@pytest.mark.parametrize(("settings", "source", "wanted"), [
    ({}, "default", "none"),
    ({"adapter": "mine"}, "default", "mine"),
    ({"adapter": "mine"}, "runs/x/checkpoints/step_1", "none"),
])
def test_training_begins_with_the_plain_base(settings, source, wanted, monkeypatch):
    asked = []

    def load(source: str, **given: object) -> None:
        asked.append((source, given["adapter"]))
        raise CheckpointError("far enough")

    monkeypatch.setattr(prepare, "load", load)
    recipe = recipe_from_dict({
        "model": settings, "run": {"out": "runs/x"}, "data": {"sources": [{"kind": "file", "path": "rows.jsonl"}]},
    })
    with pytest.raises(CheckpointError):
        prepare.prepare(recipe, source)
    assert asked == [(source, wanted)]


def test_errors_are_one_line(call, failing, base, tuned, adapter, tmp_path):
    given = ("extract", "--model", tuned, "--base", base, "-o", tmp_path / "x")
    assert "unknown dtype 'int8'" in failing(call(*given, "--dtype", "int8"), 2)
    assert "--rank" in failing(call(*given, "--rank", 0), 2)
    assert "is missing; check the path" in failing(call(*given, "--calibration", tmp_path / "no.jsonl"), 1)
    assert "nothing to extract" in failing(call("extract", "--model", base, "--base", base, "-o", tmp_path / "x"), 1)
    assert "--adapter" in failing(call("merge", "--model", base, tmp_path / "x"), 2)
    assert "leaves nothing to merge" in failing(call("merge", "--adapter", "none", tmp_path / "x"), 2)
    assert "unknown dtype 'auto'" in failing(call("merge", "--adapter", adapter, tmp_path / "x", "--dtype", "auto"), 2)
    merged = call("merge", "--model", tuned, "--adapter", adapter, tmp_path / "x")
    assert "was made for another base" in failing(merged, 1)
    assert "no such adapter folder" in failing(call("info", base, "--adapter", "./nowhere"), 1)
    assert sorted(os.listdir(tmp_path)) == ["adapter", "base", "tuned"]
