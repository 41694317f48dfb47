"""A tiny network with a second, naive implementation in float64; a tiny model folder, data and recipe."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor

from refusion.checkpoint import Checkpoint, Tokenizer, load, save
from refusion.model.config import ModelConfig
from refusion.model.transformer import Transformer
from refusion.training.loop import Trainer, TrainResult, train
from refusion.training.recipe import Recipe, apply_overrides, recipe_from_dict
from refusion.training.state import read_progress

MASK, END = 95, 1
WORDS = ["<|end|>", "<unk>", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "plus",
         "minus", "is", "so", "and", "the", "answer"]
SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 8, "max_positions": 128, "mask_token_id": MASK, "eos_token_ids": (END,),
}


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For every test here."""


def build_transformer(seed: int = 0, **changes: Any) -> Transformer:
    transformer = Transformer(ModelConfig(**{**SHAPE, **changes}))
    draw = torch.Generator().manual_seed(seed)
    for parameter in transformer.parameters():
        scale, base = (0.1, 1.0) if parameter.ndim == 1 else (0.25, 0.0)
        parameter.data = base + scale * torch.randn(parameter.shape, generator=draw)
    return transformer


@pytest.fixture
def make_transformer() -> Callable[..., Transformer]:
    """make_transformer(seed, **config changes): random weights, float32."""
    return build_transformer


class Naive:
    """The network once more, one sequence at a time, in float64 and without any fused operation."""

    def __init__(self, transformer: Transformer) -> None:
        self.config = transformer.config
        self.weights = {
            name: parameter.detach().double().requires_grad_() for name, parameter in transformer.named_parameters()
        }

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[T, V] for tokens [T] in storage order."""
        w, c = self.weights, self.config
        hidden = w["embedding.weight"][tokens]
        for number in range(c.num_layers):
            place = f"layers.{number}"
            attended = self._attention(self._norm(hidden, f"{place}.attention_norm"), positions, f"{place}.attention")
            hidden = hidden + attended
            gate_up = self._norm(hidden, f"{place}.mlp_norm") @ w[f"{place}.mlp.gate_up.weight"].T
            gate, up = gate_up[:, : c.intermediate_size], gate_up[:, c.intermediate_size :]
            hidden = hidden + (gate / (1 + torch.exp(-gate)) * up) @ w[f"{place}.mlp.down.weight"].T
        return self._norm(hidden, "norm") @ w["embedding.weight" if c.tie_embeddings else "head.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_eps) * self.weights[f"{name}.weight"]

    def _attention(self, x: Tensor, positions: Tensor, name: str) -> Tensor:
        c = self.config
        qkv = x @ self.weights[f"{name}.qkv.weight"].T
        columns = [qkv[:, at * c.head_dim : (at + 1) * c.head_dim] for at in range(c.num_heads + 2 * c.num_kv_heads)]
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        outputs = []
        for head in range(c.num_heads):
            shared = head // (c.num_heads // c.num_kv_heads)
            query = self._turn(columns[head], positions)
            key = self._turn(columns[c.num_heads + shared], positions)
            scores = (query @ key.T / c.head_dim**0.5).masked_fill(future, float("-inf"))
            outputs.append(torch.softmax(scores, -1) @ columns[c.num_heads + c.num_kv_heads + shared])
        return torch.cat(outputs, -1) @ self.weights[f"{name}.out.weight"].T

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.config.head_dim // 2
        speeds = torch.tensor([self.config.rope_theta ** (-at / half) for at in range(half)], dtype=torch.float64)
        turned = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * positions[:, None].double() * speeds)
        return torch.cat((turned.real, turned.imag), -1)


@pytest.fixture
def naive() -> type[Naive]:
    """naive(transformer): its naive twin."""
    return Naive


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A left-to-right model, without a mask token, of words of WORDS."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(WORDS)}, "<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([tokenizers.AddedToken(WORDS[0], special=True, normalized=False)])
    transformer = build_transformer(
        vocab_size=len(WORDS), mask_token_id=None, eos_token_ids=(0,), tie_embeddings=True, num_heads=2, num_kv_heads=1
    )
    tokenizer = Tokenizer(backend, eos_ids=[0], unk_id=1)
    return save(Checkpoint(transformer, tokenizer, "test"), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty different questions, with answers of 3 to 12 words."""
    numbers = WORDS[2:12]
    rows = []
    for at in range(20):
        a, b = numbers[at % 10], numbers[at // 10 + 4]
        answer = f"the answer is {a} {'and ' * (at % 7)}so {b}"
        rows.append({"question": f"{a} plus {b}", "answer": answer.strip()})
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def recipe_at(model_folder: Path, data_file: Path) -> Callable[..., Recipe]:
    """recipe_at(folder, "optim.lr=1e-3", ...): 9 steps of about 70 tokens, no validation on the way."""

    def make(folder: Path, *overrides: str) -> Recipe:
        data = {
            "model": {"source": str(model_folder)},
            "data": {"sources": [{"kind": "file", "path": str(data_file)}], "held_out": 4, "max_length": 64},
            "noise": {"slot_sizes": [2, 4]},
            "optim": {"lr": 3e-3, "warmup_steps": 2, "batch_tokens": 60, "micro_tokens": 30, "total_tokens": 600},
            "run": {"out": str(folder), "seed": 3, "threads": 1, "validate_every": 1000, "validation_rows": 3},
        }
        return recipe_from_dict(apply_overrides(data, overrides))

    return make


@pytest.fixture
def make_recipe(recipe_at: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """As recipe_at, into tmp_path/run."""
    return lambda *overrides: recipe_at(tmp_path / "run", *overrides)


@pytest.fixture(scope="session")
def whole(recipe_at: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, TrainResult]:
    """The run that nothing disturbs."""
    recipe = recipe_at(tmp_path_factory.mktemp("whole") / "run")
    return recipe, train(recipe)


class Look:
    """Looks into what runs left on the disk."""

    def __init__(self, whole: tuple[Recipe, TrainResult]) -> None:
        self.whole = whole

    def records(self, recipe: Recipe, kind: str = "step") -> list[dict[str, Any]]:
        lines = (Path(recipe.run.out) / "log.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def course(self, recipe: Recipe) -> list[tuple[float, ...]]:
        """What each step did, its seconds apart."""
        names = ("step", "tokens_seen", "ar", "mdm", "grad_norm", "lr", "tokens")
        return [tuple(record[name] for name in names) for record in self.records(recipe)]

    def weights(self, folder: Path) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in load(folder).transformer.named_parameters()}

    def assert_as_whole(self, recipe: Recipe, result: TrainResult) -> None:
        """The run's course, weights and progress are bit for bit those of `whole`."""
        assert result.model.is_dir() and self.course(recipe) == self.course(self.whole[0])
        found, wanted = self.weights(result.folder), self.weights(self.whole[1].folder)
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)
        left, right = (read_progress(each.folder)[0] for each in (result, self.whole[1]))
        assert dataclasses.replace(left, seconds=0) == dataclasses.replace(right, seconds=0)


@pytest.fixture
def look(whole: tuple[Recipe, TrainResult]) -> Look:
    """See Look."""
    return Look(whole)


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """at_step(n, act): calls act inside the n-th step that the test makes from now on, once its update is done."""

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
