"""Options that several commands share. Their defaults are DecodeConfig's, which checks the values too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

import typer

from refusion.decoding.config import ACCEPTANCES, IMPROVEMENTS, PLANNERS, DecodeConfig
from refusion.errors import ConfigError

_DECODING = "Decoding"
_OURS = "Decoding, decoder refusion only"

Model = Annotated[
    str, typer.Option("--model", "-m", help="'default', a Hugging Face folder or hub id, or a .gguf file.")
]
Adapter = Annotated[
    str | None,
    typer.Option("--adapter", help="A folder of a LoRA adapter (peft) to add; none keeps the default model's own off."),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Of the weights: auto, float32, bfloat16, float16; int8 on CPUs.")]
Compile = Annotated[bool, typer.Option("--compile", help="Fuse small operations by torch.compile; a slow start.")]
MaxCells = Annotated[
    int | None, typer.Option("--max-cells", min=1, help="Tokens that the cache may hold, all sequences together.")
]
MaskTokenId = Annotated[
    int | None, typer.Option("--mask-token-id", help="For a model whose files don't name its mask token.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Sequences decoded at the same time.")]

MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-n", help="Answer length in tokens, at most.", rich_help_panel=_DECODING)
]
SlotSize = Annotated[int, typer.Option("--slot-size", help="Positions in a slot.", rich_help_panel=_DECODING)]
BlockSize = Annotated[
    int, typer.Option("--block-size", help="Positions filled at a time.", rich_help_panel=_DECODING)
]
SlotThreshold = Annotated[
    float,
    typer.Option("--slot-threshold", help="Certainty that chooses a slot, 0 to 1.", rich_help_panel=_DECODING),
]
TokenThreshold = Annotated[
    float,
    typer.Option("--token-threshold", help="Probability that keeps a token, 0 to 1.", rich_help_panel=_DECODING),
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="0 takes the best token.", rich_help_panel=_DECODING)
]
TopP = Annotated[
    float, typer.Option("--top-p", help="Share of probability to sample from.", rich_help_panel=_DECODING)
]
Seed = Annotated[int, typer.Option("--seed", help="Fixes every draw.", rich_help_panel=_DECODING)]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Text that ends the answer; repeatable.", rich_help_panel=_DECODING),
]
Planner = Annotated[
    str, typer.Option("--planner", help=f"What makes a slot certain: {', '.join(PLANNERS)}.", rich_help_panel=_DECODING)
]
Without = Annotated[
    list[str] | None,
    typer.Option("--without", help=f"Switch off one of {', '.join(IMPROVEMENTS)}; repeatable.", rich_help_panel=_OURS),
]
Acceptance = Annotated[
    str, typer.Option("--acceptance", help=f"When a draft stays: {', '.join(ACCEPTANCES)}.", rich_help_panel=_OURS)
]
DraftThreshold = Annotated[
    float,
    typer.Option("--draft-threshold", help="Probability that sends a draft to be verified.", rich_help_panel=_OURS),
]
StaleFactor = Annotated[
    float,
    typer.Option("--stale-factor", help="Trust in drafts behind a rejected token, 0 to 1.", rich_help_panel=_OURS),
]
PlanSize = Annotated[int, typer.Option("--plan-size", help="Masks in one pass, at most.", rich_help_panel=_OURS)]

BranchSize = Annotated[
    int, typer.Option("--branch-size", help="Masks behind each doubtful draft token.", rich_help_panel=_OURS)
]
BranchThreshold = Annotated[
    float, typer.Option("--branch-threshold", help="Chance of rejection that plants a branch.", rich_help_panel=_OURS)
]


def decode_config(given: Mapping[str, Any]) -> DecodeConfig:
    """Settings from a command's parameters of the same names; a decoder of None is the default one.

    Raises:
        ConfigError: as DecodeConfig.
    """
    values = {field.name: given[field.name] for field in fields(DecodeConfig) if given.get(field.name) is not None}
    for name in given.get("without") or ():
        if name not in IMPROVEMENTS:
            raise ConfigError(f"--without knows no '{name}'; choose one of {', '.join(IMPROVEMENTS)}")
        values |= IMPROVEMENTS[name]
    return DecodeConfig(**{**values, "stop": tuple(given.get("stop") or ())})


def names(option: str, text: str) -> tuple[str, ...]:
    """The names in a list with commas.

    Raises:
        ConfigError: there is none, or one is empty or given twice.
    """
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise ConfigError(f"--{option} should be names with commas between, got '{text}'")
    if len(set(found)) < len(found):
        raise ConfigError(f"--{option} names one twice: '{text}'")
    return found
