"""`refusion train`: runs a recipe."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="All settings of the training.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting, such as optim.lr=1e-4; repeatable."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of run.out.")] = False,
) -> None:
    """Train a model by a recipe."""
    from refusion.training import loop
    from refusion.training.recipe import load_recipe

    settings = load_recipe(recipe, overrides or ())
    logging.basicConfig(format="%(asctime)s  %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("refusion").setLevel(logging.INFO)
    try:
        result = loop.train(settings, resume=resume)
    except loop.Interrupted as stop:
        raise KeyboardInterrupt(str(stop)) from None
    progress = result.progress
    typer.echo(f"trained {progress.step} steps, {progress.tokens:,} tokens; the model is {result.model}")
