"""`refusion extract`: the adapter that makes of a base what is closest to a tuned model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from refusion.cli import options
from refusion.cli.convert import DTYPES
from refusion.errors import ConfigError

if TYPE_CHECKING:
    from refusion.checkpoint import Checkpoint
    from refusion.checkpoint.low_rank import Extraction

Sequences = list[tuple[list[int], list[int]]]
"""Token ids and positions of each row."""


def extract(
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="New or empty, or an adapter to replace.")],
    model: Annotated[str, typer.Option("--model", "-m", help="The tuned model, as --model of generate.")],
    base: Annotated[str, typer.Option("--base", help="What it was tuned from; default leaves its adapter off.")] =
    "default",
    rank: Annotated[int, typer.Option("--rank", min=1, help="Of the linear layers' differences.")] = 32,
    embedding_rank: Annotated[
        int, typer.Option("--embedding-rank", min=0, help="Of the embedding's difference; 0 leaves it out.")
    ] = 0,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="Rows as training takes them; weighs by what they show."),
    ] = None,
    calibration_rows: Annotated[int, typer.Option("--calibration-rows", min=1, help="So many of them.")] = 32,
    dtype: Annotated[str, typer.Option("--dtype", help=f"Of the adapter: {', '.join(DTYPES)}.")] = "bfloat16",
    max_shard_bytes: Annotated[
        int | None,
        typer.Option("--max-shard-bytes", min=1, help="Of a file; more than one are for refusion, not for peft."),
    ] = None,
    mask_token_id: options.MaskTokenId = None,
) -> None:
    """Find the low-rank adapter between a tuned model and its base."""
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype '{dtype}'; choose one of {', '.join(DTYPES)}")

    import torch

    from refusion import checkpoint
    from refusion.checkpoint.adapter import write_adapter
    from refusion.checkpoint.low_rank import extract as run
    from refusion.checkpoint.low_rank import second_moments

    tuned = checkpoint.load(model, mask_token_id=mask_token_id)
    moments = None
    if calibration is not None:
        moments = second_moments(tuned.transformer, _sequences(calibration, calibration_rows, tuned))
    plain = checkpoint.load(base, adapter="none")
    found = run(
        plain, tuned, rank, embedding_rank=embedding_rank, dtype=getattr(torch, dtype), moments=moments
    )
    written = write_adapter(out, found.config, found.tensors, found.facts, max_shard_bytes=max_shard_bytes)
    _show(found)
    typer.echo(str(written))


def _sequences(file: Path, count: int, tuned: Checkpoint) -> Sequences:
    """The first rows of a file as the network sees them: noised as in training where it has a mask token."""
    from refusion.data.rows import RowFormat, read_conversations
    from refusion.training.encode import encode_rows
    from refusion.training.noise import noise
    from refusion.training.sections import NoiseConfig

    tokenizer, mask = tuned.tokenizer, tuned.config.mask_token_id
    if not tokenizer.eos_ids:
        raise ConfigError(f"{tuned.source} names no end token; leave --calibration out")
    end = tokenizer.eos_ids[0]
    conversations = read_conversations(file, RowFormat(strip_calculator=True))[:count]
    rows, _ = encode_rows(conversations, tokenizer, end, tuned.config.max_positions, "drop")
    found: Sequences = []
    for number, row in enumerate(rows):
        if mask is None:
            found.append(([*row.prompt, *row.answer], list(range(len(row)))))
            continue
        noised = noise(
            row.prompt, row.answer, mask_id=mask, end_id=end, settings=NoiseConfig(mask_ratio="stratified"), seed=0,
            epoch=0, example=number,
        )
        found.append((noised.tokens.tolist(), noised.positions.tolist()))
    return found


def _show(found: Extraction) -> None:
    """What is lost of each kind of module, and the size."""
    ranks = {one.kind: one.rank for one in found.matrices}
    calibrated = any(weighted is not None for _, weighted in found.mean_errors().values())
    typer.echo(f"{'module':<14}{'rank':>6}{'lost':>8}{'  lost at the inputs' if calibrated else ''}")
    for kind, (error, weighted) in found.mean_errors().items():
        seen = "" if weighted is None else f"{weighted:>20.1%}"
        typer.echo(f"{kind:<14}{ranks.get(kind) or '-':>6}{error:>8.1%}{seen}")
    typer.echo(f"{found.nbytes / 1e6:,.1f} MB")
