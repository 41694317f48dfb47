"""`refusion generate`: prompts in, answers and their figures out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refusion.cli import options
from refusion.cli.decoders import choose_decoder
from refusion.cli.prompts import Prompt, read_prompts
from refusion.decoding.config import DECODERS, DecodeConfig
from refusion.errors import ConfigError

if TYPE_CHECKING:
    from refusion.generation import Generation


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The user's text; - or nothing reads it from a pipe.")
    ] = None,
    model: options.Model = "default",
    adapter: options.Adapter = None,
    decoder: Annotated[
        str | None,
        typer.Option("--decoder", "-d", help=f"{', '.join(DECODERS)}; by default what the model is trained for."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Prompts: a line each, or .jsonl with prompt or messages.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, without the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each prompt.")] = False,
    batch_size: options.BatchSize = 8,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    compile: options.Compile = False,
    max_cells: options.MaxCells = None,
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
    """Answer a prompt, or many from a file."""
    config = options.decode_config(locals())
    prompts = read_prompts(prompt, file)
    _check_raw(raw, system, prompts)

    from refusion.generation import generate as run
    from refusion.generation import load

    loaded = load(
        model, device=device, dtype=dtype, mask_token_id=mask_token_id, compile=compile, adapter=adapter
    )
    config = replace(config, decoder=choose_decoder(decoder, loaded.config.mask_token_id, model))
    printer = _Printer(as_json)
    found = run(
        loaded, prompts, config, batch_size=batch_size, max_cells=max_cells, chat=not raw, system=system,
        on_finish=printer.finished,
    )
    for index, generation in enumerate(found):
        printer.finished(index, generation)


def _check_raw(raw: bool, system: str | None, prompts: list[Prompt]) -> None:
    if raw and system is not None:
        raise ConfigError("--system needs the chat template; leave --raw out or write the text into the prompt")
    if raw and not all(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError("messages need the chat template; leave --raw out or give prompts as text")


class _Printer:
    """Prints each generation once, in the order of the prompts, as soon as all before it are there."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._waiting: dict[int, Generation] = {}
        self._next = 0

    def finished(self, index: int, generation: Generation) -> None:
        """Takes the generation of a prompt; one that was taken before is passed over."""
        if index < self._next:
            return
        self._waiting[index] = generation
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self._print(ready)
            self._next += 1

    def _print(self, generation: Generation) -> None:
        if self._as_json:
            typer.echo(json.dumps(generation.to_dict(), ensure_ascii=False))
            return
        if self._next:
            typer.echo()
        typer.echo(generation.text)
        typer.echo(figures(generation.to_dict()), err=True)


def figures(facts: dict[str, Any]) -> str:
    """One line about what an answer cost, from `Generation.to_dict`."""
    return (
        f"{facts['tokens']} tokens, {facts['forwards']} forwards, TPF {facts['tpf']:.2f}, TPS {facts['tps']:.1f}, "
        f"{facts['seconds']:.2f} s, finish: {facts['finish_reason']}"
    )
