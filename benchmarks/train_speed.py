"""Training speed of this project's step against a plain transformers causal-LM step, in turns.

Same base weights, same examples, same precision. The plain step feeds each example's prompt
and answer to AutoModelForCausalLM with labels on the answer, padded as one batch, as a
fine-tuning script would.

    python benchmarks/train_speed.py recipes/smollm2_gsm.yaml --steps 5 --json speed.json

needs the extras `train` and `convert`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from refusion.checkpoint import load, save
from refusion.training.batches import Counts
from refusion.training.loop import Trainer
from refusion.training.noise import NO_LABEL, Noised
from refusion.training.prepare import prepare
from refusion.training.recipe import load_recipe
from refusion.training.state import Progress


def plain_batch(examples: list[Noised]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same examples unmasked and in order: ids, attention mask and labels [B, T], -100 outside the answer."""
    rows = []
    for example in examples:
        answer = example.mdm_labels != NO_LABEL
        tokens = example.tokens.copy()
        tokens[answer] = example.mdm_labels[answer]
        order = example.positions.argsort()
        labelled = answer | (example.ar_labels != NO_LABEL)
        labels = tokens[order].copy()
        labels[: example.positions[labelled].min()] = NO_LABEL
        rows.append((tokens[order], labels))
    width = max(len(tokens) for tokens, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), NO_LABEL)
    for at, (tokens, wanted) in enumerate(rows):
        ids[at, : len(tokens)] = torch.from_numpy(tokens)
        labels[at, : len(wanted)] = torch.from_numpy(wanted)
    lengths = torch.tensor([len(tokens) for tokens, _ in rows])
    return ids, (torch.arange(width) < lengths[:, None]).long(), labels


class PlainStep:
    """AdamW on transformers' own model and loss, the whole step as one batch."""

    def __init__(self, folder: Path, precision: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.precision = precision

    def __call__(self, examples: list[Noised]) -> None:
        ids, attention, labels = plain_batch(examples)
        with torch.autocast("cpu", self.precision, enabled=self.precision != torch.float32):
            loss = self.model(input_ids=ids, attention_mask=attention, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], help="override of the recipe, key=value")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    small = ["data.sources.0.size=2000", "run.validation_rows=1", "run.validate_every=1000000"]
    recipe = load_recipe(options.recipe, [*small, *options.set])
    trainer = Trainer(recipe, prepare(recipe, recipe.model.source), Progress())
    with tempfile.TemporaryDirectory() as scratch:
        folder = save(load(recipe.model.source), Path(scratch) / "base")
        plain = PlainStep(folder, trainer.precision)
    ours, theirs = [], []
    for step in range(options.steps + 1):
        examples, _ = trainer.plan.step(trainer.progress.place)
        tokens = Counts.of(examples).tokens
        began = time.perf_counter()
        plain(examples)
        middle = time.perf_counter()
        trainer.step()
        if step:  # the first step of each is cold
            theirs.append(tokens / (middle - began))
            ours.append(tokens / (time.perf_counter() - middle))
            print(f"step {step}: ReFusion {ours[-1]:.0f}, plain transformers {theirs[-1]:.0f} tokens/s", flush=True)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    result = {
        "tokens_per_second": statistics.median(ours), "plain_transformers": statistics.median(theirs),
        "ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)], "steps": options.steps,
    }
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
