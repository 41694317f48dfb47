"""From a recipe to a model, encoded rows and the plan of steps."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from refusion.checkpoint import Checkpoint, add_mask_token, load
from refusion.checkpoint.adapter import Facts, read_adapter
from refusion.data.mixture import Mixture
from refusion.data.sources import load_data
from refusion.errors import ConfigError
from refusion.training.encode import Encoded, LengthReport, encode_row, encode_rows
from refusion.training.lora import add_lora, read_lora
from refusion.training.noise import Noised
from refusion.training.plan import StepPlan
from refusion.training.recipe import Recipe

logger = logging.getLogger(__name__)
_VALIDATION_VISIT = 2**31
_VALIDATION_EXAMPLE = 2**62


@dataclass(frozen=True)
class Prepared:
    """What a trainer needs: the checkpoint, the plan of steps, noised held-out rows.

    base: of a low-rank training, what its adapter notes of the base; None where all weights are trained.
    """

    checkpoint: Checkpoint
    plan: StepPlan
    held_out: list[Noised]
    base: Facts | None = None


def prepare(recipe: Recipe, source: str) -> Prepared:
    """Loads the model from `source`, the recipe's or a checkpoint of its run, and all rows, tokenised.

    Raises:
        RefusionError: the model, a file or a setting can't be used.
    """
    checkpoint, base = _model(recipe, source)
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    if not tokenizer.eos_ids or config.mask_token_id is None:
        raise ConfigError(f"{source} names no end token; training needs one")
    if recipe.data.max_length > config.max_positions:
        raise ConfigError(f"data.max_length is {recipe.data.max_length}, {source} has {config.max_positions} positions")
    end_id = tokenizer.eos_ids[0]
    data = load_data(recipe.data, recipe.run.seed)
    for report in data.reports:
        logger.info("%s", report)
    sources: list[list[Encoded]] = []
    for rows, settings in zip(data.train, recipe.data.sources, strict=True):
        encoded, lengths = encode_rows(rows, tokenizer, end_id, recipe.data.max_length, recipe.data.over_long)
        logger.info("%s: %s", settings.label, lengths)
        sources.append(encoded)
    plan = StepPlan(
        sources,
        Mixture(sources, [s.weight for s in recipe.data.sources], recipe.run.seed),
        settings=recipe.noise,
        seed=recipe.run.seed,
        mask_id=config.mask_token_id,
        end_id=end_id,
        batch_tokens=recipe.optim.batch_tokens,
        border_labels=recipe.loss.border_labels,
    )
    # unlike in training, where nothing fits there is only nothing to validate on
    report = LengthReport()
    held = [encode_row(row, tokenizer, end_id, recipe.data.max_length, "drop", report) for row in data.held_out]
    chosen = [row for row in held if row is not None][: recipe.run.validation_rows]
    if held and recipe.run.validation_rows and not chosen:
        logger.warning("no validation: all %d held-out rows are longer than data.max_length", len(held))
    noised = [plan.noised(row, _VALIDATION_VISIT, _VALIDATION_EXAMPLE + at) for at, row in enumerate(chosen)]
    return Prepared(checkpoint, plan, noised, base)


def _model(recipe: Recipe, source: str) -> tuple[Checkpoint, Facts | None]:
    model, resumes = recipe.model, source != recipe.model.source
    dtype, device = getattr(torch, model.dtype), _device()
    if not recipe.lora.rank:
        # a resume goes on from weights that the adapter is already part of
        checkpoint = load(source, dtype=dtype, device=device, adapter="none" if resumes else model.adapter)
        return add_mask_token(checkpoint), None
    checkpoint = load(model.source, dtype=dtype, device=device, adapter="none")
    base = add_lora(checkpoint, recipe.lora, recipe.run.seed)
    begin = source if resumes else model.adapter
    if begin != "none":
        read_lora(checkpoint, recipe.lora, base, read_adapter(begin))
    return checkpoint, base


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
