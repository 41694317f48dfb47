"""Algorithms for one sequence, each a generator of steps (see refusion.decoding.contract)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from refusion.decoding.autoregressive import autoregressive
from refusion.decoding.board import Board, StopCheck
from refusion.decoding.config import DecodeConfig
from refusion.decoding.contract import Algorithm, Row
from refusion.decoding.draw import Draws
from refusion.decoding.paper import paper
from refusion.decoding.refusion import refusion
from refusion.errors import ConfigError

__all__ = ["Board", "DecodeConfig", "algorithm", "cells_needed"]


def algorithm(
    config: DecodeConfig,
    prompt: Sequence[int],
    *,
    end_ids: Sequence[int],
    mask_id: int | None,
    stop_check: StopCheck | None = None,
    index: int = 0,
) -> Callable[[Row], Algorithm]:
    """The chosen decoder for one prompt, waiting for its row.

    index: the prompt's place in its call, which with the seed fixes its draws.

    Raises:
        ConfigError: the decoder needs a mask token and the model has none, the prompt holds the
            mask token, or it is empty where a first token is needed.
    """
    board = Board(config.max_tokens, end_ids, stop_check)
    if mask_id is not None and mask_id in prompt:
        raise ConfigError(f"the prompt holds the mask token (id {mask_id}), which only the decoder may write")
    if config.decoder == "autoregressive":
        if not prompt:
            raise ConfigError("left-to-right decoding needs at least one prompt token")
        return lambda row: autoregressive(row, prompt, board, Draws(config, index))
    if mask_id is None:
        raise ConfigError(
            f"the decoder '{config.decoder}' needs a model with a mask token; train one or use 'autoregressive'"
        )
    decoder = paper if config.decoder == "paper" else refusion
    return lambda row: decoder(row, prompt, config, board, mask_id, Draws(config, index))


def cells_needed(config: DecodeConfig, prompt_tokens: int) -> int:
    """Cells of the cache that an answer takes at most: what is committed, and the widest pass behind it."""
    widest = {"autoregressive": 1, "paper": 2 * config.block_size}.get(config.decoder)
    if widest is None:
        # the chances of being the first rejected add up to 1 at most, and a branch needs branch_threshold of it
        fed = 2 * config.block_size
        branches = int(min(fed, 1 / max(config.branch_threshold, 1e-9)))
        widest = fed + min(config.plan_size, fed) + config.branch_size * branches
    return prompt_tokens + config.max_tokens + widest
