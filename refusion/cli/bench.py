"""`refusion bench`: decoders and other engines side by side on the same prompts; a table, and files of the figures."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refusion.cli import options, table
from refusion.cli.decoders import choose_decoder
from refusion.cli.progress import progress
from refusion.decoding.config import DECODERS, DecodeConfig
from refusion.errors import ConfigError, DataError

if TYPE_CHECKING:
    from refusion.evaluation.bench import BenchSettings
    from refusion.generation import Model

TASK = "gsm_symbolic"
Tasks = Annotated[str | None, typer.Option("--tasks", help=f"reasoning-gym generators, commas between; else {TASK}.")]
Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="Instead: a prompt a line, or .jsonl rows with question, answer."),
]
Limit = Annotated[
    int | None, typer.Option("--limit", help="Problems of each task, else 50; prompts of a file, else all.")
]
Decoders = Annotated[
    str | None, typer.Option("--decoders", help=f"{','.join(DECODERS)}; by default all that the model can do.")
]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant", metavar="'NAME: KEY=VALUE,...'",
        help="A row with other decoding settings, such as 'no branches: branch_size=0'; repeatable.",
    ),
]
Timed = Annotated[int, typer.Option("--timed", help="Problems also answered one at a time, for TPS.")]
ProblemSeed = Annotated[int, typer.Option("--problem-seed", help="Which problems are made.")]
ExcludeRecipe = Annotated[
    Path | None, typer.Option("--exclude-recipe", metavar="RECIPE.yaml", help="Leave its training's questions out.")
]
Peers = Annotated[str, typer.Option("--peers", help="Other engines, on the timed problems: transformers,llama.cpp.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write rows and settings.")]
SamplesFile = Annotated[
    Path | None, typer.Option("--samples", metavar="FILE", help="Write every scored answer, a JSON object a line.")
]


def bench(
    model: options.Model = "default",
    adapter: options.Adapter = None,
    tasks: Tasks = None,
    prompts: Prompts = None,
    limit: Limit = None,
    decoders: Decoders = None,
    variant: Variants = None,
    timed: Timed = 20,
    problem_seed: ProblemSeed = 0,
    exclude_recipe: ExcludeRecipe = None,
    peers: Peers = "",
    json_file: JsonFile = None,
    samples_file: SamplesFile = None,
    batch_size: options.BatchSize = 8,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    compile: options.Compile = False,
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
    planner: options.Planner = DecodeConfig.planner,
    without: options.Without = None,
    acceptance: options.Acceptance = DecodeConfig.acceptance,
    draft_threshold: options.DraftThreshold = DecodeConfig.draft_threshold,
    stale_factor: options.StaleFactor = DecodeConfig.stale_factor,
    plan_size: options.PlanSize = DecodeConfig.plan_size,
    branch_size: options.BranchSize = DecodeConfig.branch_size,
    branch_threshold: options.BranchThreshold = DecodeConfig.branch_threshold,
) -> None:
    """Compare decoders, variants of them and other engines in quality, speed and memory."""
    decode = options.decode_config(locals())
    asked = None if decoders is None else options.names("decoders", decoders)

    from refusion.evaluation.bench import BenchSettings
    from refusion.evaluation.variants import parse_variant
    from refusion.generation import load

    shared = BenchSettings(
        TASK, limit, asked or DECODERS, decode, batch_size, timed, problem_seed,
        options.names("peers", peers) if peers else (), tuple(map(parse_variant, variant or ())), prompts,
    )
    exclude = [] if exclude_recipe is None else _questions(exclude_recipe)
    settings = _settings(shared, tasks, exclude)
    loaded = load(
        model, device=device, dtype=dtype, mask_token_id=mask_token_id, compile=compile, adapter=adapter
    )
    chosen = _choose(asked, shared, loaded.config.mask_token_id, model)
    found, samples = _run(loaded, [replace(one, decoders=chosen) for one in settings], exclude)
    table.show(found["rows"])
    _write(json_file, json.dumps(found, indent=2) + "\n")
    _write(samples_file, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples))


def _settings(shared: BenchSettings, tasks: str | None, exclude: list[str]) -> list[BenchSettings]:
    """The settings for each task, or for the file of prompts; all that can fail without a model has been tried."""
    from refusion.evaluation.peers import check_peer
    from refusion.evaluation.questions import read_questions

    for peer in shared.peers:
        check_peer(peer)
    if shared.prompts is None:
        return [replace(shared, task=task) for task in options.names("tasks", TASK if tasks is None else tasks)]
    if tasks is not None:
        raise ConfigError("give --tasks or --prompts, not both")
    read_questions(shared.prompts, shared.limit, exclude)
    return [shared]


def _run(
    model: Model, settings: list[BenchSettings], exclude: list[str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Rows of every task, the settings they share, and all scored answers; an interrupt prints what is complete."""
    from refusion.evaluation.bench import BenchInterrupted, Sample, run_bench

    rows: list[dict[str, Any]] = []
    samples: list[Sample] = []
    shared: dict[str, Any] = {}
    for one in settings:
        try:
            with progress(one.title) as tell:
                found = run_bench(model, one, exclude=exclude, progress=tell, samples=samples)
        except KeyboardInterrupt as stop:
            part = stop.found["rows"] if isinstance(stop, BenchInterrupted) else []
            complete = rows + [{"task": one.title, **row} for row in part]
            if complete:
                table.show(complete)
            raise
        rows += [{"task": one.title, **row} for row in found["rows"]]
        shared = {**found["settings"], "tasks": [task.title for task in settings]}
    shared.pop("task", None)
    return {"rows": rows, "settings": shared}, [sample.to_dict() for sample in samples]


def _choose(
    names: tuple[str, ...] | None, shared: BenchSettings, mask_token_id: int | None, model: str
) -> tuple[str, ...]:
    """The decoders to run: those asked for, else all that the model can do."""
    for variant in shared.variants:
        decoder = variant.apply(shared.decode).decoder
        if decoder != "autoregressive":  # which every model can do
            choose_decoder(decoder, mask_token_id, model)
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


def _write(file: Path | None, text: str) -> None:
    """Writes a file wholly or not at all."""
    if file is None:
        return
    partial = file.with_name(f".{file.name}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, file)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{file}: can't be written ({error.strerror or error}); name another file") from None
