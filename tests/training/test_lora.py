"""Low-rank training: starts as the base, changes nothing but its adapter, and its files load as what was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from refusion.checkpoint import Checkpoint, add_mask_token, load
from refusion.checkpoint.adapter import read_adapter, read_facts
from refusion.errors import CheckpointError
from refusion.training.loop import open_trainer, train
from refusion.training.lora import LoraLinear, add_lora, read_lora, write_lora
from refusion.training.recipe import Recipe
from refusion.training.sections import LoraConfig

RANK = LoraConfig(rank=3, alpha=6.0)
LORA = ("lora.rank=3", "lora.alpha=6", "lora.dtype=float32", "optim.lr=3e-2")


def hidden(checkpoint: Checkpoint) -> torch.Tensor:
    """Of the mask token among others, at true positions that run out of order."""
    tokens = torch.tensor([[2, 5, 7, checkpoint.config.mask_token_id, 3, checkpoint.config.mask_token_id]])
    return checkpoint.transformer(tokens, torch.tensor([[0, 1, 4, 5, 2, 3]])).detach()


@pytest.fixture
def run(make_recipe: Callable[..., Recipe]) -> tuple[Recipe, Any]:
    recipe = make_recipe(*LORA)
    return recipe, train(recipe)


def disturb(checkpoint: Checkpoint) -> None:
    with torch.no_grad():
        for parameter in checkpoint.transformer.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))


def test_begins_as_the_base(model_folder: Path) -> None:
    wanted = hidden(add_mask_token(load(model_folder)))
    checkpoint = load(model_folder)
    add_lora(checkpoint, RANK, seed=1)
    assert torch.equal(hidden(checkpoint), wanted)


def test_trains_differences_of_every_linear_layer_and_the_mask_row(model_folder: Path) -> None:
    checkpoint = load(model_folder)
    add_lora(checkpoint, RANK, seed=1)
    trained = {name for name, p in checkpoint.transformer.named_parameters() if p.requires_grad}
    places = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    wanted = {f"layers.{at}.{place}.{half}" for at in range(2) for place in places for half in "ab"}
    assert trained == wanted | {"embedding.row"}


def test_the_layer_is_what_the_formula_says() -> None:
    base = torch.nn.Linear(5, 7)
    layer = LoraLinear(base, (3, 4), 2, 6.0, torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.b.normal_()
    x = torch.randn(4, 5)
    a, b = layer.a.double(), layer.b.double()
    delta = torch.cat([b[:3] @ a[:2], b[3:] @ a[2:]]) * 3.0
    wanted = x.double() @ (base.weight.double() + delta).T + base.bias.double()
    torch.testing.assert_close(layer(x).double(), wanted, rtol=1e-4, atol=1e-5)


def test_the_written_adapter_loads_as_the_trained_network(model_folder: Path, tmp_path: Path) -> None:
    checkpoint = load(model_folder)
    facts = add_lora(checkpoint, RANK, seed=1)
    disturb(checkpoint)
    write_lora(checkpoint, RANK, facts, tmp_path / "adapter")
    loaded = load(model_folder, adapter=tmp_path / "adapter")
    torch.testing.assert_close(hidden(loaded), hidden(checkpoint), rtol=1e-4, atol=1e-5)


def test_a_run_leaves_an_adapter_and_the_model_with_it(run: tuple[Recipe, Any], model_folder: Path) -> None:
    recipe, result = run
    adapter = Path(recipe.run.out) / "adapter"
    assert read_facts(adapter / "refusion_adapter.json").base == model_folder.name
    merged, added = load(result.model), load(model_folder, adapter=adapter)
    assert torch.equal(hidden(merged), hidden(added))
    assert not torch.equal(hidden(merged), hidden(add_mask_token(load(model_folder))))


def test_checkpoints_hold_the_adapter_alone(run: tuple[Recipe, Any]) -> None:
    _, result = run
    names = {path.name for path in result.folder.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "refusion_adapter.json",
                     "optimizer.safetensors", "training.json"}


def test_a_resumed_run_ends_as_one_that_nothing_disturbed(
    run: tuple[Recipe, Any], recipe_at: Callable[..., Recipe], tmp_path: Path
) -> None:
    again = recipe_at(tmp_path / "again", *LORA, "optim.schedule=constant", "optim.total_tokens=250")
    train(again)
    longer = recipe_at(tmp_path / "again", *LORA, "optim.schedule=constant")
    resumed = train(longer, resume=True)
    plain = train(recipe_at(tmp_path / "plain", *LORA, "optim.schedule=constant"))
    left, right = (read_adapter(one.folder).changes for one in (resumed, plain))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[m][e], right[m][e]) for m in left for e in left[m])


def test_goes_on_from_an_adapter(run: tuple[Recipe, Any], recipe_at: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe, result = run
    second = recipe_at(tmp_path / "second", *LORA, f"model.adapter={Path(recipe.run.out) / 'adapter'}")
    trainer = open_trainer(second, resume=False)
    torch.testing.assert_close(hidden(trainer.checkpoint), hidden(load(result.model)), rtol=1e-4, atol=1e-5)
    assert trainer.progress.step == 0


def test_another_alpha_keeps_what_was_trained(model_folder: Path, tmp_path: Path) -> None:
    checkpoint = load(model_folder)
    facts = add_lora(checkpoint, RANK, seed=1)
    disturb(checkpoint)
    write_lora(checkpoint, RANK, facts, tmp_path / "adapter")
    other, settings = load(model_folder), LoraConfig(rank=3, alpha=1.5)
    read_lora(other, settings, add_lora(other, settings, seed=2), read_adapter(tmp_path / "adapter"))
    torch.testing.assert_close(hidden(other), hidden(checkpoint), rtol=1e-4, atol=1e-5)


def test_another_rank_is_refused(run: tuple[Recipe, Any], recipe_at: Callable[..., Recipe], tmp_path: Path) -> None:
    adapter = Path(run[0].run.out) / "adapter"
    recipe = recipe_at(tmp_path / "other", *LORA, "lora.rank=4", f"model.adapter={adapter}")
    with pytest.raises(CheckpointError, match="lora.rank needs"):
        open_trainer(recipe, resume=False)
