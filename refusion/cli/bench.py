"""`refusion bench`: decoders side by side on tasks with known answers; a table, and files of rows and answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refusion.cli import options, table
from refusion.cli.decoders import choose_decoder
from refusion.decoding.config import DECODERS, DecodeConfig
from refusion.errors import DataError

if TYPE_CHECKING:
    from refusion.evaluation.bench import BenchSettings
    from refusion.generation import Model


def bench(
    model: options.Model = "default",
    tasks: Annotated[str, typer.Option("--tasks", help="reasoning-gym generators, commas between.")] = "gsm_symbolic",
    limit: Annotated[int, typer.Option("--limit", help="Problems of each task.")] = 50,
    decoders: Annotated[
        str | None, typer.Option("--decoders", help=f"{','.join(DECODERS)}; by default all that the model can do.")
    ] = None,
    timed: Annotated[int, typer.Option("--timed", help="Problems also answered one at a time, for TPS.")] = 20,
    problem_seed: Annotated[int, typer.Option("--problem-seed", help="Which problems are made.")] = 0,
    exclude_recipe: Annotated[
        Path | None, typer.Option("--exclude-recipe", metavar="RECIPE.yaml", help="Leave its training's questions out.")
    ] = None,
    peers: Annotated[str, typer.Option("--peers", help="Other engines, on the timed problems: transformers.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write rows and settings.")] = None,
    samples_file: Annotated[
        Path | None, typer.Option("--samples", metavar="FILE", help="Write every scored answer, a JSON object a line.")
    ] = None,
    batch_size: options.BatchSize = 8,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    mask_token_id: options.MaskTokenId = None,
    max_tokens: options.MaxTokens = DecodeConfig.max_tokens,
    slot_size: options.SlotSize = DecodeConfig.slot_size,
    block_size: options.BlockSize = DecodeConfig.block_size,
    slot_threshold: options.SlotThreshold = DecodeConfig.slot_threshold,
    token_threshold: options.TokenThreshold = DecodeConfig.token_threshold,
    temperature: options.Temperature = DecodeConfig.temperature,
    top_p: options.TopP = DecodeConfig.top_p,
    seed: options.Seed = DecodeConfig.seed,
    stop: options.Stop = None,
    acceptance: options.Acceptance = DecodeConfig.acceptance,
    draft_threshold: options.DraftThreshold = DecodeConfig.draft_threshold,
    stale_factor: options.StaleFactor = DecodeConfig.stale_factor,
    plan_size: options.PlanSize = DecodeConfig.plan_size,
    branch_size: options.BranchSize = DecodeConfig.branch_size,
    branch_threshold: options.BranchThreshold = DecodeConfig.branch_threshold,
) -> None:
    """Compare decoders in quality and speed."""
    decode = options.decode_config(locals())
    asked = None if decoders is None else options.names("decoders", decoders)
    others = options.names("peers", peers) if peers else ()

    from refusion.evaluation.bench import BenchSettings

    settings = [
        BenchSettings(task, limit, asked or DECODERS, decode, batch_size, timed, problem_seed, others)
        for task in options.names("tasks", tasks)
    ]
    exclude = [] if exclude_recipe is None else _questions(exclude_recipe)

    from refusion.generation import load

    loaded = load(model, device=device, dtype=dtype, mask_token_id=mask_token_id)
    chosen = _choose(asked, loaded.config.mask_token_id, model)
    found, samples = _run(loaded, [replace(one, decoders=chosen) for one in settings], exclude)
    table.show(found["rows"])
    _write(json_file, json.dumps(found, indent=2) + "\n")
    _write(samples_file, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples))


def _run(
    model: Model, settings: list[BenchSettings], exclude: list[str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Rows of every task, the settings they share, and all scored answers."""
    from refusion.evaluation.bench import Sample, run_bench

    rows: list[dict[str, Any]] = []
    samples: list[Sample] = []
    shared: dict[str, Any] = {}
    for one in settings:
        with _progress(one.task) as tell:
            found = run_bench(model, one, exclude=exclude, progress=tell, samples=samples)
        rows += [{"task": one.task, **row} for row in found["rows"]]
        shared = {**found["settings"], "tasks": [task.task for task in settings]}
    shared.pop("task", None)
    return {"rows": rows, "settings": shared}, [sample.to_dict() for sample in samples]


def _choose(names: tuple[str, ...] | None, mask_token_id: int | None, model: str) -> tuple[str, ...]:
    """The decoders to run: those asked for, else all that the model can do."""
    if names is not None:
        for name in names:
            choose_decoder(name, mask_token_id, model)
        return names
    best = choose_decoder(None, mask_token_id, model)
    return DECODERS if mask_token_id is not None else (best,)


def _questions(recipe: Path) -> list[str]:
    """Every question of a training, the held-out ones too."""
    from refusion.data.sources import load_data
    from refusion.data.split import conversation_key
    from refusion.training.recipe import load_recipe

    settings = load_recipe(recipe)
    data = load_data(settings.data, settings.run.seed)
    return [conversation_key(row) for rows in (*data.train, data.held_out) for row in rows]


@contextmanager
def _progress(task: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        row = bar.add_task(task, total=None)
        yield lambda phase, done, total: bar.update(row, description=f"{task}, {phase}", completed=done, total=total)


def _write(file: Path | None, text: str) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{file}: can't be written ({error.strerror or error}); name another file") from None
